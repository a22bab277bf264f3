"""The timeline of a run, as arrays that the page draws from.

`digest` reads ``trace.json.gz`` once. It takes a second for the largest trace, in which nothing
else of this process would go on: so it is done by a process of its own, ``python -m
rlinf_async.view.spans FILE``, which writes the result to its output.

Spans are in rows, by worker, lane and depth: those of a row follow each other, so that the page
finds by bisection which of them are seen. Times are microseconds from the first one.
"""

from __future__ import annotations

import gzip
import struct
import sys
import zlib
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from rlinf_async.observe.files import RunFolderError, explaining

MAGIC: Final = b"RLTL"
"""first bytes of a digest; then the length of its header (uint32), the header, and the arrays"""
MOST_TRACKS: Final = 400
"""tracks of numbers that are kept, in the order of their names"""


class _Event(msgspec.Struct):
    ph: str
    name: str
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    cat: str = ""
    args: dict[str, Any] = {}


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]


def digest(path: Path) -> bytes:
    """The trace as header and arrays: see `MAGIC`. All of the arrays are little endian::

        start[spans] float64, duration[spans] float32, name[spans] uint16    in the order of rows
        at[values] float64, value[values] float64                           in the order of tracks
        args[spans + 1] uint32                                              ends in the text below
        text                                                                JSON of the arguments

    Raises:
        RunFolderError: the file cannot be read, or is not a trace.
    """
    with explaining("read", path):
        content = path.read_bytes()
    try:
        text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        events = msgspec.json.decode(text, type=_Trace).traceEvents
    except (msgspec.DecodeError, EOFError, OSError, zlib.error) as error:
        raise RunFolderError(f"{path} is not a trace of a run: {error}") from error
    workers = {one.pid: str(one.args.get("name")) for one in events if one.name == "process_name"}
    spans = [one for one in events if one.ph == "X"]
    spans.sort(key=lambda one: (one.pid, one.tid, one.ts, -one.dur))
    rows, order = _rows(spans, workers)
    ordered = [spans[at] for at in order]
    names = list(dict.fromkeys(one.name for one in ordered))[:65_535]
    number = {name: at for at, name in enumerate(names)}
    texts = [msgspec.json.encode(one.args) if one.args else b"" for one in ordered]
    tracks, at, value = _tracks([one for one in events if one.ph == "C"])
    last = max((one.ts + one.dur for one in spans), default=0.0)
    arrays = (
        np.array([one.ts for one in ordered], "<f8"),
        np.array([one.dur for one in ordered], "<f4"),
        np.array([number.get(one.name, 65_535) for one in ordered], "<u2"),
        np.array(at, "<f8"),
        np.array(value, "<f8"),
        np.cumsum([0, *map(len, texts)], dtype="<u4"),
    )
    header = {
        "spans": len(ordered),
        "end": max(last, max(at, default=0.0)),
        "names": names,
        "waits": [name == "wait" or name.startswith("wait ") for name in names],
        "rows": rows,
        "tracks": tracks,
        "values": len(at),
    }
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    parts = [MAGIC, struct.pack("<I", len(encoded)), encoded]
    return b"".join([*parts, *(one.tobytes() for one in arrays), *texts])


def _rows(spans: list[_Event], workers: dict[int, str]) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows, each with its number of spans, and the order of the spans in them."""
    found: dict[tuple[int, int, int], list[int]] = {}
    place, ends = (0, 0), list[float]()
    for at, one in enumerate(spans):
        if (one.pid, one.tid) != place:
            place, ends = (one.pid, one.tid), []
        # A thousandth of a microsecond: times were nanoseconds before they were divided.
        while ends and ends[-1] <= one.ts + 1e-3:
            ends.pop()
        found.setdefault((*place, len(ends)), []).append(at)
        ends.append(one.ts + one.dur)
    order = [at for _, row in sorted(found.items()) for at in row]
    rows = [
        {"worker": workers.get(pid, f"process {pid}"), "lane": tid % 1000, "depth": depth,
         "count": len(row)}
        for (pid, tid, depth), row in sorted(found.items())
    ]  # fmt: skip
    return rows, order


def _tracks(values: list[_Event]) -> tuple[list[dict[str, Any]], list[float], list[float]]:
    """Tracks of numbers, each with its mean over time and its end, and all of their values."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in values:
        for number in one.args.values():
            found.setdefault(one.name, []).append((one.ts, float(number)))
    tracks: list[dict[str, Any]] = []
    moments: list[float] = []
    numbers: list[float] = []
    for name in sorted(found)[:MOST_TRACKS]:
        at, value = np.array(sorted(found[name])).T
        lasting = np.diff(at, append=at[-1])
        whole = float(lasting.sum())
        mean = float((value * lasting).sum() / whole) if whole > 0 else float(value[-1])
        largest = float(value.max())
        tracks.append({"name": name, "count": len(at), "mean": mean, "largest": largest})
        moments += at.tolist()
        numbers += value.tolist()
    return tracks, moments, numbers


def header_of(digested: bytes) -> dict[str, Any]:
    """The header of a digest."""
    (length,) = struct.unpack_from("<I", digested, len(MAGIC))
    begin = len(MAGIC) + 4
    found: dict[str, Any] = msgspec.json.decode(digested[begin : begin + length])
    return found


def drawn_part(digested: bytes) -> bytes:
    """A digest without the arguments of its spans, which are asked for one by one."""
    header = header_of(digested)
    return digested[: _arguments_at(digested, header)]


def _arguments_at(digested: bytes, header: dict[str, Any]) -> int:
    (length,) = struct.unpack_from("<I", digested, len(MAGIC))
    arrays: int = header["spans"] * (8 + 4 + 2) + header["values"] * 16
    return len(MAGIC) + 4 + int(length) + arrays


def arguments_of(digested: bytes, span: int) -> dict[str, Any]:
    """The arguments of a span, by its place in the order of rows.

    Raises:
        IndexError: there is no such span.
    """
    header = header_of(digested)
    count = header["spans"]
    if not 0 <= span < count:
        raise IndexError(f"there are {count} spans, and none has the number {span}")
    begin = _arguments_at(digested, header)
    first, after = struct.unpack_from("<2I", digested, begin + 4 * span)
    text = begin + 4 * (count + 1)
    content = digested[text + first : text + after]
    found: dict[str, Any] = msgspec.json.decode(content) if content else {}
    return found


if __name__ == "__main__":
    try:
        sys.stdout.buffer.write(digest(Path(sys.argv[1])))
    except RunFolderError as problem:
        sys.exit(str(problem))
