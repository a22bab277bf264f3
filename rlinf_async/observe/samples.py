"""The samples of a run that are kept: what the model said, and what it got for it; of a run in
environments, the summary of each episode.

::

    run --put(rows)--> [ queue, bounded ] --thread--> samples/000001.jsonl   a record on each line
                              |                       samples/000001.index   a `ROW` for each line
                              +-- full: left out, counted, said once

    read_samples(run, iteration=12, best=5) <-- `SampleIndex` <-- both

A record is JSON, so that ``pandas.read_json(..., lines=True)`` and ``datasets`` read the segments
as they are. The index has what records are chosen and ordered by, and where each stands, so that
nobody has to read all records to show some: 100,000 are chosen from, and put in order, within
milliseconds::

    index = SampleIndex(run)                 # a run that goes on: index.refresh() for what is new
    chosen = index.choose(iteration=12)      # numbers of records, oldest first
    chosen = index.ordered(chosen, "reward") # or "tokens", "iteration", ...
    page = index.read(chosen[50:100])        # the records themselves, as dicts
    index.rows["reward"]                     # any column of `ROW`, of all records
    index.texts(page[0]["tokens"])           # the text of each token of a language model

Token ids have their texts in ``vocabulary.jsonl``, each once: ``[id, text]`` on a line.

Invariant: however often a run is killed and resumed, each record stands here once. Records carry
the ``step`` of the row of ``metrics.csv`` that they belong to; a resumed run drops those after its
checkpoint, which are made again. A kill can tear only the last line, which is never read.

The index only saves work: what it does not have, because a process was killed between the two
writes, is read from the lines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.config import ConfigError
from rlinf_async.observe.files import RunFolderError, append_all, explaining
from rlinf_async.observe.run_folder import check_is_run

FOLDER: Final = "samples"
VOCABULARY: Final = "vocabulary.jsonl"
TRAINED: Final = 0
EVALUATION: Final = 1
KINDS: Final = ("training", "evaluation")
"""what a record was made for, by its number in the index"""
OUTCOMES: Final = ("scored", "rejected", "failed")
"""what became of it, by its number in the index"""
ROW: Final = np.dtype(
    [
        ("offset", "<u8"),  # of the line in its segment, in bytes
        ("length", "<u4"),  # of the line with its line break
        ("iteration", "<i4"),  # that trained it; of an evaluation the version
        ("step", "<i8"),  # of the row of metrics.csv
        ("group", "<i8"),  # ``name`` is group/index
        ("index", "<i4"),
        ("tokens", "<i4"),  # of the response; of an episode in an environment its steps
        ("reward", "<f8"),  # NaN: not scored; of an episode in an environment its return
        ("kind", "u1"),  # of `KINDS`
        ("outcome", "u1"),  # of `OUTCOMES`
        ("trained", "u1"),  # 1: it was trained on
        ("success", "i1"),  # of an episode in an environment: 1, 0, or -1: it does not say
        ("", "V4"),
    ]
)
"""one record in the index"""

SEGMENTS: Final = 16
"""segments that a full store has"""
LEAST_SEGMENT: Final = 64 * 1024
MOST_SEGMENT: Final = 64 * 1024 * 1024
CHUNK: Final = 256 * 1024
"""most bytes that are written at once, but for a record that is larger"""
OF_INDEX: Final = 1.25
"""size of a segment with its index, relative to its lines, or more than that"""
WAITING: Final = 4
"""batches, of an iteration each, that may wait to be written"""
CLOSE_SECONDS: Final = 20.0
"""seconds that the end of a run waits for a disk"""
_SEGMENT: Final = re.compile(r"\d{6}\.jsonl")
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)B\s*")
_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

log = logging.getLogger(__name__)


def size_in_bytes(text: str) -> int:
    """Return the bytes of a size such as ``"500 MB"``; k, M, G, T are powers of 1000.

    Raises `ValueError` for anything else.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f'{text!r} is no size: write a number and its unit, such as "500 MB"')
    return int(float(found[1]) * _UNITS[found[2]])


class SamplesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run keeps of its samples, in ``samples/`` of its folder."""

    keep: int | Literal["all"] = "all"
    """number of samples of each iteration, the first of its prompts; 0: none"""
    limit: str = "1 GB"
    """size of them all: ``"500 MB"``; the oldest are removed to stay below it"""

    def __post_init__(self) -> None:
        if isinstance(self.keep, int) and self.keep < 0:
            raise ConfigError(f"{self.keep} is below 0; 0 keeps none", path=("keep",))
        try:
            least = size_in_bytes(self.limit)
        except ValueError as error:
            raise ConfigError(str(error), path=("limit",)) from None
        if least < 2 * LEAST_SEGMENT:
            raise ConfigError(
                f"{self.limit!r} is below {2 * LEAST_SEGMENT / 1000:.0f} kB, which no run stays "
                "within; keep = 0 keeps none",
                path=("limit",),
            )

    @property
    def on(self) -> bool:
        """Whether any are kept."""
        return self.keep != 0


class KeptSample(msgspec.Struct, kw_only=True):
    """What every record has; a job's own have more."""

    name: str
    """``group/index``: unique among those of its kind"""
    kind: Literal["training", "evaluation"]
    step: int
    """step of the row of ``metrics.csv`` that it belongs to"""
    iteration: int
    """iteration that trained it; of an evaluation the version that was evaluated"""
    trained: bool
    """whether it was trained on"""
    outcome: Literal["scored", "rejected", "failed"]
    reward: float | None
    """reward, or the return of an episode in an environment; None: it was not scored"""
    size: int
    """tokens of the response; steps of an episode in an environment"""
    success: bool | msgspec.UnsetType | None = msgspec.UNSET
    """of an episode in an environment; None: it does not say"""
    level: int | msgspec.UnsetType = msgspec.UNSET
    """level of the curriculum in which an episode in an environment began"""


_Make = Callable[[], Iterable[KeptSample]]


class _Batch(NamedTuple):
    make: _Make
    size: int
    """number of its records"""


class SampleWriter:
    """Writes the samples of a run, in a thread of its own: nothing that it does is waited for.

    Args:
        run: the run's folder.
        config: what is kept.
        keep_to: last step of an earlier start that is kept; those after it come again. None keeps
            nothing.
    """

    def __init__(self, run: Path, config: SamplesConfig, *, keep_to: int | None) -> None:
        self._config = config
        self._store = _Store(run / FOLDER, size_in_bytes(config.limit), keep_to)
        self._queue: queue.Queue[_Batch | threading.Event | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._said = False
        self._broken = ""
        """why what an earlier start has written could not be taken up"""
        self.left_out = 0
        """samples that could not be written"""
        if config.on or (run / FOLDER).exists():  # also to drop what comes again
            self._thread = threading.Thread(target=self._work, name="samples", daemon=True)
            self._thread.start()

    def put(self, make: _Make, count: int) -> None:
        """Let the records be written that ``make`` returns, ``count`` of them, oldest first.

        It is called in the thread that writes. Where the disk is behind by `WAITING` such batches,
        they are left out.
        """
        if not self._config.on or self._thread is None:
            return
        if self._config.keep != "all":
            count = min(count, self._config.keep)
        try:
            self._queue.put_nowait(_Batch(make, count))
        except queue.Full:
            self._leave_out(count, "the disk is too slow")

    def flushed(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until all that was put is written; False where that takes longer."""
        if self._thread is None or not self._thread.is_alive():
            return True
        written, deadline = threading.Event(), time.monotonic() + seconds
        try:
            self._queue.put(written, timeout=seconds)
        except queue.Full:
            return False
        return written.wait(max(0.0, deadline - time.monotonic()))

    def close(self, seconds: float = CLOSE_SECONDS) -> dict[str, int]:
        """Write what waits, and end; give up on a disk that takes longer than this.

        Returns how many samples are not kept, by a name for the summary; nothing if all are.
        """
        if self._thread is not None:
            deadline = time.monotonic() + seconds
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=seconds)
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                log.warning("the samples of the last iterations are not written: the disk hangs")
            self._thread = None
        return {"samples that are not kept": self.left_out} if self.left_out else {}

    def _work(self) -> None:
        self._open()
        while (one := self._queue.get()) is not None:
            if isinstance(one, threading.Event):
                one.set()
            else:
                self._write(one)
        self._store.close()

    def _open(self) -> None:
        try:
            self._store.open()
        except (OSError, RunFolderError) as error:
            self._broken = str(error)

    def _write(self, batch: _Batch) -> None:
        if self._broken:
            self._leave_out(batch.size, self._broken)
            return
        written = 0
        try:
            for rows in _chunks(batch, self._store.chunk):
                self._store.append(rows)
                written += len(rows)
        except (OSError, RunFolderError) as error:
            self._leave_out(batch.size - written, str(error))
        except Exception as error:  # a record that cannot be made costs itself, not the run
            log.debug("a sample", exc_info=True)
            self._leave_out(batch.size - written, f"{type(error).__name__}: {error}")

    def _leave_out(self, count: int, why: str) -> None:
        self.left_out += count
        self._say(why)

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            log.warning("samples are not kept (%s); the run goes on without them", why)


class _Line(NamedTuple):
    text: bytes
    entry: _Entry


def _chunks(batch: _Batch, most: int) -> Iterator[list[_Line]]:
    """The first ``batch.size`` records as lines, as many as are written at once."""
    lines: list[_Line] = []
    size = 0
    for record, _ in zip(batch.make(), range(batch.size), strict=False):
        text = msgspec.json.encode(record) + b"\n"
        if lines and size + len(text) > most:
            yield lines
            lines, size = [], 0
        lines.append(_Line(text, _entry(record, len(text))))
        size += len(text)
    if lines:
        yield lines


_Entry = tuple[int, int, int, int, int, int, float, int, int, int, int, bytes]
"""the fields of `ROW` behind the offset"""


def _entry(record: KeptSample, length: int) -> _Entry:
    """The entry of a record in the index, but for its offset."""
    group, _, index = record.name.partition("/")
    return (
        length,
        record.iteration,
        record.step,
        int(group),
        int(index),
        record.size,
        float("nan") if record.reward is None else record.reward,
        KINDS.index(record.kind),
        OUTCOMES.index(record.outcome),
        record.trained,
        record.success if isinstance(record.success, bool) else -1,
        b"",
    )


class _Store:
    """The segments, as their writer sees them."""

    def __init__(self, folder: Path, limit: int, keep_to: int | None) -> None:
        self._folder = folder
        self._limit = limit
        self._keep_to = keep_to
        self._segment_size = min(MOST_SEGMENT, max(LEAST_SEGMENT, limit // SEGMENTS))
        self.chunk = min(CHUNK, self._segment_size)
        """bytes to append at once"""
        self._number = 0
        self._lines = self._index = -1
        """descriptors of the newest segment"""
        self._size = 0
        """bytes of its lines"""

    def open(self) -> None:
        """Drop what an earlier start has written after the step that is kept."""
        if not self._folder.exists():
            return
        for path in segments(self._folder):
            if self._keep_to is None:
                _remove(path)
                continue
            rows = read_index(path)
            kept = rows[rows["step"] <= self._keep_to]
            if not len(kept):
                _remove(path)
                continue
            end = int(kept[-1]["offset"] + kept[-1]["length"])
            _index_of(path).write_bytes(kept.tobytes())
            os.truncate(path, end)
            self._number = int(path.stem)

    def append(self, lines: Sequence[_Line]) -> None:
        """Write the lines to the newest segment, and then their entries.

        Raises:
            OSError: nothing of them was written, or, where the index cannot be, the lines were.
        """
        new = sum(len(text) for text, _ in lines)
        if self._lines < 0 or (self._size and self._size + new > self._segment_size):
            self._begin_segment()
        starts = accumulate((len(text) for text, _ in lines), initial=self._size)
        entries = [(start, *line.entry) for start, line in zip(starts, lines, strict=False)]
        rows = np.array(entries, ROW)
        append_all(self._lines, b"".join(text for text, _ in lines))
        self._size += new
        append_all(self._index, rows.tobytes())

    def _begin_segment(self) -> None:
        self.close()
        with explaining("make", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._make_room()
        path = self._folder / f"{self._number + 1:06d}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        with explaining("write", path):
            self._lines = os.open(path, flags, 0o666)
            self._index = os.open(_index_of(path), flags, 0o666)
        self._number += 1
        self._size = 0

    def _make_room(self) -> None:
        """Remove the oldest segments, so that another one has room."""
        sizes = [(path, _bytes_of(path)) for path in segments(self._folder)]
        total = sum(size for _, size in sizes) + int(OF_INDEX * self._segment_size)
        for path, size in sizes:
            if total <= self._limit:
                return
            _remove(path)
            total -= size

    def close(self) -> None:
        for descriptor in (self._lines, self._index):
            if descriptor >= 0:
                os.close(descriptor)
        self._lines = self._index = -1


def segments(folder: Path) -> list[Path]:
    """The segments of a folder, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if _SEGMENT.fullmatch(path.name))


def _index_of(segment: Path) -> Path:
    return segment.with_suffix(".index")


def _bytes_of(segment: Path) -> int:
    size = 0
    for path in (segment, _index_of(segment)):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def _remove(segment: Path) -> None:
    for path in (segment, _index_of(segment)):
        path.unlink(missing_ok=True)


def read_index(segment: Path) -> NDArray[np.void]:
    """The entries of all whole lines of a segment, also of those that its index does not have.

    Raises:
        OSError: a file cannot be read.
    """
    size = segment.stat().st_size
    try:
        stored = _index_of(segment).read_bytes()
    except FileNotFoundError:
        stored = b""
    rows = np.frombuffer(stored[: len(stored) // ROW.itemsize * ROW.itemsize], ROW)
    ends = rows["offset"] + rows["length"]
    starts = np.concatenate([np.zeros(1, ends.dtype), ends[:-1]])
    fits = (ends <= size) & (starts == rows["offset"]) & (rows["length"] > 0)
    count = len(rows) if fits.all() else int(np.argmin(fits))
    end = int(ends[count - 1]) if count else 0
    if end == size:
        return rows[:count]
    return np.concatenate([rows[:count], *_indexed(segment, end)])


def _indexed(segment: Path, start: int) -> Iterator[NDArray[np.void]]:
    """The entries of the lines from this byte on; the last one may be torn."""
    with segment.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                entry = _entry(msgspec.json.decode(line, type=KeptSample), len(line))
            except (msgspec.DecodeError, ValueError):
                return  # a block that never reached the disk; what follows cannot be trusted
            yield np.array([(start, *entry)], ROW)
            start += len(line)


def read_vocabulary(folder: Path) -> dict[int, str]:
    """Return the texts of tokens that are known in a folder of samples, by id.

    Raises:
        RunFolderError: the file cannot be read.
    """
    path = folder / VOCABULARY
    with explaining("read", path):
        content = path.read_bytes() if path.exists() else b""
    texts: dict[int, str] = {}
    for line in content.splitlines():
        with contextlib.suppress(msgspec.DecodeError):  # torn by a kill
            number, text = msgspec.json.decode(line, type=tuple[int, str])
            texts[number] = text
    return texts


class Vocabulary:
    """The texts of the tokens in a run's samples, each written once, when it is first met.

    Args:
        run: the run's folder.
        decode: tokens -> text, special tokens included.
    """

    def __init__(self, run: Path, decode: Callable[[Sequence[int]], str]) -> None:
        self._path = run / FOLDER / VOCABULARY
        self._decode = decode
        self._known: NDArray[np.bool_] | None = None
        """by token id"""

    def note(self, *tokens: NDArray[np.integer[Any]]) -> None:
        """Write the texts of those that are new.

        Raises:
            OSError: they cannot be written.
        """
        every = np.concatenate(tokens)
        known = self._read() if self._known is None else self._known
        if len(every) and int(every.max()) >= len(known):
            known = np.concatenate([known, np.zeros(int(every.max()) + 1, np.bool_)])
        self._known = known
        new = np.unique(every[~known[every]])
        if not len(new):
            return
        lines = [msgspec.json.encode((one, self._decode([one]))) for one in new.tolist()]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:  # the line break first: a line before may have been torn by a kill
            append_all(descriptor, b"".join(b"\n" + line for line in lines))
        finally:
            os.close(descriptor)
        known[new] = True

    def _read(self) -> NDArray[np.bool_]:
        found = list(read_vocabulary(self._path.parent))
        known = np.zeros(max(found, default=0) + 1, np.bool_)
        known[found] = True
        return known


class _Segment(NamedTuple):
    path: Path
    state: tuple[int, int, int]
    """inode, size and time of the file when it was read"""
    rows: NDArray[np.void]


class SampleIndex:
    """The records of a run, in the order in which they were written; see the module.

    Args:
        run: the run's folder.

    Raises:
        RunFolderError: it is not a run's folder, or a file in it cannot be read.
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.run = Path(run).expanduser()
        check_is_run(self.run)
        self._segments: list[_Segment] = []
        self._starts = np.zeros(0, np.int64)
        """number of the first record of each segment"""
        self._texts: dict[int, str] = {}
        self.rows: NDArray[np.void] = np.zeros(0, ROW)
        """the index: a `ROW` for each record"""
        self.refresh()

    def __len__(self) -> int:
        return len(self.rows)

    def texts(self, tokens: Iterable[int]) -> list[str]:
        """Return the text of each token; empty where it is not known."""
        tokens = list(tokens)
        if not self._texts.keys() >= set(tokens):
            self._texts = read_vocabulary(self.run / FOLDER)
        return [self._texts.get(one, "") for one in tokens]

    def refresh(self) -> bool:
        """Look for what a run that goes on has written; True where anything has changed: numbers of
        records from before hold no longer where the oldest were removed, or a run was resumed."""
        known = {one.path: one for one in self._segments}
        found: list[_Segment] = []
        for path in segments(self.run / FOLDER):
            with explaining("read", path), contextlib.suppress(FileNotFoundError):  # removed now
                told, before = path.stat(), known.get(path)
                state = (told.st_ino, told.st_size, told.st_mtime_ns)
                if before is not None and before.state == state:
                    found.append(before)
                else:
                    found.append(_Segment(path, state, read_index(path)))
        if [id(one) for one in found] == [id(one) for one in self._segments]:
            return False
        self._segments = found
        sizes = [len(one.rows) for one in found]
        self._starts = np.cumsum([0, *sizes])[:-1]
        self.rows = np.concatenate([np.zeros(0, ROW), *(one.rows for one in found)])
        return True

    @property
    def iterations(self) -> list[int]:
        """The iterations of which there are any, in order."""
        trained = self.rows["iteration"][self.rows["kind"] == TRAINED]
        return [int(one) for one in np.unique(trained)]

    def choose(
        self,
        *,
        iteration: int | None = None,
        name: str | None = None,
        failed: bool = False,
        kind: Literal["training", "evaluation"] | None = None,
    ) -> NDArray[np.int64]:
        """Return the numbers of the records that fit all of these, oldest first.

        Args:
            iteration: the one that trained them.
            name: ``group/index``, or ``group`` alone: all samples of a prompt.
            failed: those that were not scored; of episodes in environments, those that did not
                succeed.
            kind: what they were made for.
        """
        rows = self.rows
        fits = np.ones(len(rows), np.bool_)
        if iteration is not None:
            fits &= (rows["iteration"] == iteration) & (rows["kind"] == TRAINED)
        if name is not None:
            fits &= _named(rows, name)
        if failed:
            fits &= (rows["outcome"] != 0) | (rows["success"] == 0)
        if kind is not None:
            fits &= rows["kind"] == KINDS.index(kind)
        return np.flatnonzero(fits)

    def ordered(
        self, chosen: NDArray[np.int64], by: str, *, descending: bool = False
    ) -> NDArray[np.int64]:
        """Return the chosen numbers in the order of a column of `ROW`; without a value (NaN) they
        are last, and equal ones are in the order in which they were written."""
        values = self.rows[by][chosen].astype(np.float64)
        return chosen[np.argsort(-values if descending else values, kind="stable")]

    def best(self, count: int, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of the chosen with the highest rewards, the highest first."""
        scored = chosen[~np.isnan(self.rows["reward"][chosen])]
        return self.ordered(scored, "reward", descending=True)[:count]

    def worst(self, count: int, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of the chosen with the lowest rewards, the lowest first."""
        scored = chosen[~np.isnan(self.rows["reward"][chosen])]
        return self.ordered(scored, "reward")[:count]

    def read(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """Return the records of these numbers; left out is what has been removed meanwhile."""
        return [msgspec.json.decode(line) for line in self.lines(numbers)]

    def lines(self, numbers: Iterable[int]) -> Iterator[bytes]:
        """The records of these numbers as they are written, each with its line break.

        Raises:
            RunFolderError: a segment cannot be read.
        """
        files: dict[Path, int] = {}
        try:
            for number in numbers:
                segment = int(np.searchsorted(self._starts, number, side="right")) - 1
                path, row = self._segments[segment].path, self.rows[number]
                line = _line_of(files, path, int(row["offset"]), int(row["length"]))
                if line is not None:
                    yield line
        finally:
            for descriptor in files.values():
                os.close(descriptor)


def _line_of(files: dict[Path, int], path: Path, offset: int, length: int) -> bytes | None:
    """The line at this place; None where its segment was removed, or written anew, meanwhile."""
    with explaining("read", path):
        if path not in files:
            try:
                files[path] = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                return None
        line = os.pread(files[path], length, offset)
    return line if len(line) == length and line.endswith(b"\n") else None


def _named(rows: NDArray[np.void], name: str) -> NDArray[np.bool_]:
    group, slash, index = name.partition("/")
    try:
        found: NDArray[np.bool_] = rows["group"] == int(group)
        return found & (rows["index"] == int(index)) if slash else found
    except ValueError:
        return np.zeros(len(rows), np.bool_)


def read_samples(
    run: str | os.PathLike[str],
    *,
    iteration: int | None = None,
    name: str | None = None,
    failed: bool = False,
    best: int | None = None,
    worst: int | None = None,
    kind: Literal["training", "evaluation"] | None = None,
) -> list[dict[str, Any]]:
    """Return the samples of a run, oldest first, as dicts: ``pandas.DataFrame(read_samples(run))``.

    Args:
        run: the run's folder; the run may go on.
        iteration: only those that this iteration trained.
        name: only those of this name, ``group/index``, or of this prompt, ``group``.
        failed: only those that were not scored, or did not succeed.
        best: as many with the highest rewards, the highest first.
        worst: as many with the lowest rewards, the lowest first; after the best ones.
        kind: only those that were made for this.

    Raises:
        RunFolderError: it is not a run's folder, or a file in it cannot be read.
    """
    index = SampleIndex(run)
    chosen = index.choose(iteration=iteration, name=name, failed=failed, kind=kind)
    return index.read(extremes(index, chosen, best, worst))


def extremes(
    index: SampleIndex, chosen: NDArray[np.int64], best: int | None, worst: int | None
) -> NDArray[np.int64]:
    """Return the best and then the worst of the chosen, each once; all where neither is asked."""
    if best is None and worst is None:
        return chosen
    first = index.best(best or 0, chosen)
    rest = chosen[~np.isin(chosen, first)]
    return np.concatenate([first, index.worst(worst or 0, rest)])
