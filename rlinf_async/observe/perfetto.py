"""The trace file: Chrome's JSON trace format, compressed. https://ui.perfetto.dev opens it.

One process per worker. Spans of a worker that overlap without one containing the other (tasks of
one event loop do) cannot be in one row of that format; they get rows of their own, as few as
possible, which the file calls threads.

Numbers over time (`Counter`) are tracks of one more process, "channels".

Format: "Trace Event Format", complete events (``ph: X``) and counters (``ph: C``), times in
microseconds.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from rlinf_async.observe.counters import Counter
from rlinf_async.observe.errors import RunFolderError
from rlinf_async.observe.files import atomic_write, explaining
from rlinf_async.observe.trace import Argument, Span

_GZIP: Final = b"\x1f\x8b"
_LEVEL: Final = 3  # of compression: a tenth of the size, at some 100 MB/s


class _Event(msgspec.Struct, omit_defaults=True):
    ph: str
    name: str
    pid: int
    tid: int
    ts: float | None = None
    dur: float | None = None
    cat: str | None = None
    args: dict[str, Argument] | None = None


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]
    displayTimeUnit: str = "ms"
    otherData: dict[str, Argument] = {}


def write_perfetto(
    spans: Iterable[Span],
    path: Path,
    *,
    left_out: Mapping[str, int] | None = None,
    counters: Iterable[Counter] = (),
) -> None:
    """Write the spans of all workers as one trace; time 0 is the start of the earliest.

    Args:
        path: with the suffix ``.gz`` it is compressed.
        left_out: by worker, how many spans its recorder had to leave out; noted in the file.
        counters: tracks of numbers, shown below the workers.

    Raises:
        RunFolderError: the file cannot be written.
    """
    rows = by_worker(spans)
    numbers = sorted(counters, key=lambda one: (one.track, one.at))
    starts = (span.start for row in rows.values() for span in row)
    origin = min((*starts, *(one.at for one in numbers)), default=0)
    events: list[_Event] = []
    for pid, (worker, row) in enumerate(rows.items(), start=1):
        events += _process(pid, worker, row, origin)
    events += _tracks(len(rows) + 1, numbers, origin)
    notes: dict[str, Argument] = {"monotonic_ns_at_0": origin}
    notes |= {f"spans left out of {worker}": n for worker, n in (left_out or {}).items() if n}
    content = msgspec.json.encode(_Trace(events, otherData=notes))
    atomic_write(path, gzip.compress(content, _LEVEL) if path.suffix == ".gz" else content)


def read_perfetto(path: Path) -> list[Span]:
    """The spans of a trace that `write_perfetto` wrote, times relative to the earliest.

    Raises:
        RunFolderError: the file cannot be read, or is not such a trace.
    """
    with explaining("read", path):
        content = path.read_bytes()
    try:
        text = gzip.decompress(content) if content.startswith(_GZIP) else content
        events = msgspec.json.decode(text, type=_Trace).traceEvents
    except (msgspec.DecodeError, EOFError, OSError, zlib.error) as error:
        raise RunFolderError(f"{path} is not a trace of a run: {error}") from error
    workers = {e.pid: str((e.args or {})["name"]) for e in events if e.name == "process_name"}
    return [
        Span(workers[e.pid], e.name, _nanoseconds(e.ts), _nanoseconds(e.dur), e.args)
        for e in events
        if e.ph == "X"
    ]


def by_worker(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """The spans of each worker by start, an enclosing one first; workers in natural order."""
    rows: dict[str, list[Span]] = {}
    for span in spans:
        rows.setdefault(span.worker, []).append(span)
    for row in rows.values():
        row.sort(key=lambda span: (span.start, -span.duration))
    return {worker: rows[worker] for worker in sorted(rows, key=_natural)}


def _process(pid: int, worker: str, row: list[Span], origin: int) -> list[_Event]:
    """The events of one worker: its name, its rows' names, its spans."""
    events = [
        _Event("M", "process_name", pid, 0, args={"name": worker}),
        _Event("M", "process_sort_index", pid, 0, args={"sort_index": pid}),
    ]
    open_ends: list[list[int]] = []
    for span in row:
        lane = _lane(span, open_ends)
        if lane == len(open_ends):
            open_ends.append([])
            name = worker if lane == 0 else f"{worker} ({lane + 1})"
            events.append(_Event("M", "thread_name", pid, _tid(pid, lane), args={"name": name}))
        open_ends[lane].append(span.end)
        events.append(_complete(span, pid, _tid(pid, lane), origin))
    return events


def _tracks(pid: int, counters: Sequence[Counter], origin: int) -> list[_Event]:
    """The numbers over time, as tracks of a process of their own."""
    if not counters:
        return []
    return [
        _Event("M", "process_name", pid, 0, args={"name": "channels"}),
        _Event("M", "process_sort_index", pid, 0, args={"sort_index": pid}),
        *(
            _Event(
                "C", f"{one.track} {name}", pid, 0, ts=(one.at - origin) / 1000, args={name: value}
            )
            for one in counters
            for name, value in one.values.items()
        ),
    ]


def _lane(span: Span, open_ends: list[list[int]]) -> int:
    """The first lane in which the span stands alone or within the span that is still open."""
    for lane, ends in enumerate(open_ends):
        while ends and ends[-1] <= span.start:
            ends.pop()
        if not ends or span.end <= ends[-1]:
            return lane
    return len(open_ends)


def _tid(pid: int, lane: int) -> int:
    """A thread id that no other process of the trace uses: viewers take them as global."""
    return pid * 1000 + lane


def _complete(span: Span, pid: int, tid: int, origin: int) -> _Event:
    return _Event(
        "X",
        span.name,
        pid,
        tid,
        ts=(span.start - origin) / 1000,
        dur=span.duration / 1000,
        cat="wait" if span.waiting else "work",
        args=span.args,
    )


def _nanoseconds(microseconds: float | None) -> int:
    return round((microseconds or 0.0) * 1000)


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders ``env 10`` after ``env 9``."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
