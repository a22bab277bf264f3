"""Spans: what a worker did, from when, for how long; and the trace file made of them.

Every worker has its own `SpanRecorder` and hands its spans on with `take`; the run merges them by
time alone. Times are of ``CLOCK_MONOTONIC`` in nanoseconds, which begins when a host starts and is
the same for all of its processes. Those of other hosts are aligned where they arrive, by offsets
that `PeerClock` measures::

    this host   sent ----------------------- received        the true offset is between
    other host            its time                           its time - received and its time - sent

Where an offset of zero is possible, it is zero.

Invariant: a span is either in what `take` returns, once, or counted in ``left_out``.

At every moment one span is in the foreground: of those that are open the one that started last, and
a wait only while nothing else is open. So the pieces of `foreground` never overlap, and their times
add up.

The file is of Chrome's JSON trace format, compressed; https://ui.perfetto.dev opens it ("Trace
Event Format": complete events, ``ph: X``, and counters, ``ph: C``, times in microseconds). A worker
is a process in it. Spans of a worker that overlap without one containing the other (tasks of one
event loop do) cannot be in one row of that format; they get rows of their own, as few as possible,
which the file calls threads. Numbers over time (`Counter`) are tracks of one more process,
"channels".
"""

from __future__ import annotations

import gzip
import heapq
import itertools
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

import msgspec

from rlinf_async.observe.files import RunFolderError, atomic_write, explaining

Argument = str | int | float | bool

WAIT: Final = "wait"
"""Spans of this name, or that start with ``wait `` (as in ``wait actions``), are idle time."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A worker was busy with ``name`` (or waited, see `WAIT`). Times in nanoseconds."""

    worker: str
    name: str
    start: int
    duration: int
    args: dict[str, Argument] | None = None

    @property
    def end(self) -> int:
        return self.start + self.duration

    @property
    def waiting(self) -> bool:
        return is_waiting(self.name)


def is_waiting(name: str) -> bool:
    """Whether a span of this name is time in which its worker had nothing to do."""
    return name == WAIT or name.startswith(f"{WAIT} ")


class Fit(msgspec.Struct, array_like=True):
    """Weighted sums for a straight line ``seconds = a + b x``, least squares."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, weight: float = 1.0) -> None:
        """Add a point."""
        self.weight += weight
        self.x += weight * x
        self.y += weight * y
        self.xx += weight * x * x
        self.xy += weight * x * y

    def plus(self, other: Fit, sign: float = 1.0) -> Fit:
        """Return the sums of both, or with ``sign`` -1 those that came after ``other``."""
        return Fit(
            self.weight + sign * other.weight,
            self.x + sign * other.x,
            self.y + sign * other.y,
            self.xx + sign * other.xx,
            self.xy + sign * other.xy,
        )

    def line(self) -> tuple[float, float]:
        """Return ``a`` and ``b``, neither below 0; where all x are alike, the mean and 0."""
        if self.weight <= 0.0:
            return 0.0, 0.0
        x, y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - x * x
        slope = (self.xy / self.weight - x * y) / spread if spread > 1e-6 * (x * x) else 0.0
        slope = min(max(slope, 0.0), y / x if x > 0.0 else 0.0)
        return y - slope * x, slope


class Work(msgspec.Struct, omit_defaults=True):
    """Work of one name of one worker, since it began or over a time. Open work counts up to now."""

    name: str
    """a span's name, or that of pieces of work that the trace does not have; empty: all spans
    together, waits left out"""
    seconds: float = 0.0
    """seconds with at least one piece under way"""
    total: float = 0.0
    """seconds of all pieces, a sum; of those at most ``capacity`` at a time count"""
    full: float = 0.0
    """seconds with ``capacity`` pieces under way or more"""
    count: int = 0
    """pieces that are over"""
    capacity: int = 0
    """pieces that the worker can work on at a time; 0: not known"""
    size: float = 0.0
    """items, tokens or rows of the pieces that are over, where they were counted"""
    fit: Fit | None = None
    """seconds by load: of each token by the pieces beside it, of each pass by its rows"""

    @property
    def waiting(self) -> bool:
        """Whether it is no work but a wait."""
        return is_waiting(self.name)

    def since(self, before: Work) -> Work:
        """Return what came after ``before``."""
        fit = self.fit if self.fit is None or before.fit is None else self.fit.plus(before.fit, -1)
        return Work(
            self.name,
            self.seconds - before.seconds,
            self.total - before.total,
            self.full - before.full,
            self.count - before.count,
            self.capacity,
            self.size - before.size,
            fit,
        )


UNBOUNDED: Final = 1 << 60


class _Kind:
    """Work of one name, up to the time ``at``. Times in nanoseconds."""

    __slots__ = (
        "at", "capacity", "count", "fit", "full", "name", "open", "seconds", "size", "together",
        "total",
    )  # fmt: skip

    def __init__(self, name: str, at: int, together: _Kind | None) -> None:
        self.name, self.at, self.together = name, at, together
        self.open = self.count = self.seconds = self.total = self.full = 0
        self.capacity = UNBOUNDED
        self.size = 0.0
        self.fit: Fit | None = None

    def change(self, by: int, at: int) -> None:
        """``by`` more pieces are under way from now on."""
        now = self.open
        if now > 0 and (passed := at - self.at) > 0:
            self.seconds += passed
            if now < self.capacity:
                self.total += now * passed
            else:
                self.full += passed
                self.total += self.capacity * passed
        self.at = at
        self.open = now + by
        if by < 0:
            self.count -= by

    def add(self, size: float, x: float, y: float, weight: float = 1.0) -> None:
        """Note the size of a piece, and a point of the line."""
        self.size += size
        self.fit = self.fit or Fit()
        self.fit.add(x, y, weight)

    def seen(self) -> Work:
        """Return it as it is now."""
        return Work(
            self.name,
            self.seconds / 1e9,
            self.total / 1e9,
            self.full / 1e9,
            self.count,
            0 if self.capacity == UNBOUNDED else self.capacity,
            self.size,
            None if self.fit is None else msgspec.structs.replace(self.fit),
        )


KINDS_KEPT: Final = 64
"""names of work of one worker that are told apart; the others share one"""
OTHERS: Final = "others"


class Meter:
    """How long a worker has worked on what, as sums: some ten steps of arithmetic for a piece.

    Args:
        clock: returns nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, _Kind] = {}
        self._everything = _Kind("", clock(), None)
        """all spans together, waits left out"""

    def change(self, name: str, by: int, at: int) -> None:
        """``by`` pieces of this name began, or, below 0, ended at this time."""
        with self._lock:
            kind = self._kinds.get(name)
            if kind is None:
                kind = self._kind(name, at)
            kind.change(by, at)
            if kind.together is not None:
                kind.together.change(by, at)

    def open(self) -> tuple[str, ...]:
        """The names of what is under way, a name as often as it is, without waits."""
        with self._lock:
            return tuple(
                name
                for name, kind in self._kinds.items()
                if kind.together is not None
                for _ in range(kind.open)
            )

    def serves(self, name: str, capacity: int) -> None:
        """Note how many pieces of this name can be worked on at a time."""
        with self._lock:
            kind = self._kind(name, self.clock())
            if kind.capacity != capacity:
                kind.change(0, self.clock())
                kind.capacity = capacity

    def batch(self, name: str, size: float) -> _Batch:
        """A context manager that measures its block as the work on ``size`` rows or items at once;
        not one that raises."""
        return _Batch(self, name, size)

    def add(self, name: str, size: float, began: int) -> None:
        """Note work on ``size`` rows or items, which ends now."""
        seconds = (self.clock() - began) / 1e9
        with self._lock:
            self._kind(name, began).add(size, size, seconds)

    @contextmanager
    def beside(self, name: str) -> Iterator[Piece]:
        """Measure the block as a piece of work that others go on beside; it sets the size."""
        piece = Piece()
        began = self.clock()
        with self._lock:
            kind = self._kind(name, began)
            kind.together = None  # such pieces are no spans
            kind.change(1, began)
            before = kind.total
        try:
            yield piece
        finally:
            ended = self.clock()
            passed = ended - began
            with self._lock:
                kind.change(-1, ended)
                if piece.size > 0.0 and passed > 0:
                    others = (kind.total - before) / passed
                    kind.add(piece.size, others, passed / 1e9 / piece.size, piece.size)

    def seen(self) -> list[Work]:
        """Return all work so far."""
        now = self.clock()
        with self._lock:
            every = [*self._kinds.values(), self._everything]
            for kind in every:
                kind.change(0, max(now, kind.at))
            return [kind.seen() for kind in every]

    def _kind(self, name: str, at: int) -> _Kind:
        """Return the work of this name."""
        found = self._kinds.get(name)
        if found is None:
            if len(self._kinds) >= KINDS_KEPT:
                name = OTHERS
            together = None if is_waiting(name) else self._everything
            found = self._kinds.setdefault(name, _Kind(name, at, together))
        return found


class _Batch:
    """Work on several rows. No generator: it stands in every forward pass."""

    __slots__ = ("_began", "_meter", "_name", "_size")

    def __init__(self, meter: Meter, name: str, size: float) -> None:
        self._meter, self._name, self._size = meter, name, size

    def __enter__(self) -> None:
        self._began = self._meter.clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._meter.add(self._name, self._size, self._began)


class Piece:
    """A piece of work that others go on beside."""

    size = 0.0
    """tokens, or items, that were made"""


class SpanRecorder:
    """Records the spans of one worker, from its loop and its compute thread alike.

    Holds the newest ``capacity`` spans; older ones that nobody took are left out, and counted.
    ``clock`` returns nanoseconds: in virtual time, the loop's.

    ::

        with recorder.span("forward", batch=64):
            ...
    """

    def __init__(
        self,
        worker: str,
        *,
        capacity: int = 100_000,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}: a recorder must hold at least one span")
        self.worker = worker
        self.left_out = 0
        """Spans that had to go because nobody took them in time."""
        self._spans: deque[tuple[str, int, int, dict[str, Argument] | None]] = deque(
            maxlen=capacity
        )
        self._capacity = capacity
        self.clock = clock
        self.meter = Meter(clock)
        """sums of the same spans, which nobody has to take"""
        self._lock = threading.Lock()

    def span(self, name: str, /, **args: Argument) -> _Recording:
        """A context manager that records its block as one span, also when the block raises."""
        return _Recording(self, name, args or None)

    def doing(self) -> tuple[str, ...]:
        """The names of the open spans, a name as often as it is open, without waits."""
        return self.meter.open()

    def record(self, name: str, start: int, duration: int, /, **args: Argument) -> None:
        """Record a span that was timed elsewhere, by ``time.monotonic_ns``."""
        self.add(name, start, duration, args or None)

    def add(self, name: str, start: int, duration: int, args: dict[str, Argument] | None) -> None:
        """`record` for a caller that has its arguments in a dict."""
        with self._lock:
            if len(self._spans) == self._capacity:
                self.left_out += 1
            self._spans.append((name, start, duration, args))

    def take(self) -> list[Span]:
        """The spans since the last `take`, in the order in which they ended."""
        with self._lock:
            spans, self._spans = self._spans, deque(maxlen=self._capacity)
        return [Span(self.worker, *span) for span in spans]

    def __len__(self) -> int:
        return len(self._spans)


class _Recording:
    """One open span."""

    __slots__ = ("_args", "_name", "_recorder", "_start")

    def __init__(self, recorder: SpanRecorder, name: str, args: dict[str, Argument] | None) -> None:
        self._recorder = recorder
        self._name = name
        self._args = args

    def __enter__(self) -> None:
        self._start = self._recorder.clock()
        self._recorder.meter.change(self._name, 1, self._start)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        start, now = self._start, self._recorder.clock()
        self._recorder.meter.change(self._name, -1, now)
        self._recorder.add(self._name, start, now - start, self._args)


class ForegroundPeriod(NamedTuple):
    """A stretch of time in which one span was in the foreground. Nanoseconds."""

    start: int
    end: int
    name: str
    waiting: bool


class Busy(msgspec.Struct, frozen=True):
    """Work of one worker by span name, over a window that is the same for all workers."""

    worker: str
    window: int
    """Length of the window, in nanoseconds."""
    seconds_by_name: dict[str, float]
    """Foreground seconds of each span name, waits left out."""

    @property
    def idle_share(self) -> float:
        """Share of the window in which the worker waited or recorded nothing, 0 to 1."""
        if self.window <= 0:
            return 0.0
        return max(0.0, 1.0 - sum(self.seconds_by_name.values()) * 1e9 / self.window)


def foreground(spans: Sequence[Span]) -> list[ForegroundPeriod]:
    """The pieces of one worker's spans, in order of time. O(n log n)."""
    spans = sorted(spans, key=lambda span: span.start)
    moments = sorted({moment for span in spans for moment in (span.start, span.end)})
    pieces: list[ForegroundPeriod] = []
    open_spans: list[tuple[bool, int, int]] = []  # (waiting, -order of start, end)
    coming = 0
    for moment, until in itertools.pairwise(moments):
        while coming < len(spans) and spans[coming].start <= moment:
            span = spans[coming]
            heapq.heappush(open_spans, (span.waiting, -coming, span.end))
            coming += 1
        while open_spans and open_spans[0][2] <= moment:
            heapq.heappop(open_spans)
        if open_spans:
            waiting, order, _ = open_spans[0]
            _extend(pieces, ForegroundPeriod(moment, until, spans[-order].name, waiting))
    return pieces


def busy(worker: str, pieces: Sequence[ForegroundPeriod], window: int) -> Busy:
    """Sum up a worker's pieces over a window of ``window`` nanoseconds."""
    seconds: dict[str, float] = {}
    for piece in pieces:
        if not piece.waiting:
            seconds[piece.name] = seconds.get(piece.name, 0.0) + (piece.end - piece.start) / 1e9
    return Busy(worker, window, seconds)


def _extend(pieces: list[ForegroundPeriod], piece: ForegroundPeriod) -> None:
    """Append, joined to the piece before where that one goes on."""
    if pieces and pieces[-1].end == piece.start and pieces[-1].name == piece.name:
        piece = piece._replace(start=pieces.pop().start)
    pieces.append(piece)


MEASUREMENTS_KEPT: Final = 16
"""The best of so many counts: clocks drift apart by up to 0.1 ms a second."""


class PeerClock:
    """The monotonic clock of another process, in nanoseconds of this one's."""

    def __init__(self) -> None:
        self._bounds: deque[tuple[int, int]] = deque(maxlen=MEASUREMENTS_KEPT)
        """least and greatest offset that each measurement allows"""

    def measure(self, sent: int, there: int, received: int) -> None:
        """Note that the peer's clock showed ``there`` between these two times of this clock."""
        self._bounds.append((there - received, there - sent))

    @property
    def offset(self) -> int:
        """The peer's time minus this one's, off by at most `uncertainty`; 0 where not measured."""
        least, greatest = self._best
        return 0 if least <= 0 <= greatest else (least + greatest) // 2

    @property
    def uncertainty(self) -> int:
        """Half of the shortest round trip."""
        least, greatest = self._best
        return (greatest - least) // 2

    def aligned(self, spans: Iterable[Span]) -> list[Span]:
        """The peer's spans, in the time of this process."""
        offset = self.offset
        if offset == 0:
            return list(spans)
        return [msgspec.structs.replace(span, start=span.start - offset) for span in spans]

    @property
    def _best(self) -> tuple[int, int]:
        return min(self._bounds, key=lambda bounds: bounds[1] - bounds[0], default=(0, 0))


class Counter(msgspec.Struct, frozen=True, array_like=True):
    """The values of a track of the trace from a moment on. Nanoseconds, on the clock of spans."""

    track: str
    at: int
    values: dict[str, float]


class CountRates:
    """Growth of counts per second, from one look at them to the next."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, Mapping[str, float]]] = {}
        self._at = self._before = 0

    def per_second(self, name: str, at: int, counts: Mapping[str, float]) -> dict[str, float]:
        """Growth per second since the last look; 0 at the first. A new count began at 0.

        Args:
            at: now, in nanoseconds; the same for all that are looked at together.
        """
        if at != self._at:
            self._before, self._at = self._at or at, at
        before, old = self._last.get(name, (self._before, {}))
        self._last[name] = at, counts
        seconds = (at - before) / 1e9
        if seconds <= 0:
            return dict.fromkeys(counts, 0.0)
        return {key: (value - old.get(key, 0.0)) / seconds for key, value in counts.items()}


_GZIP: Final = b"\x1f\x8b"
"""first bytes of a gzip file"""
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
        path: path of the file; compressed if its suffix is ``.gz``.
        left_out: number of spans that recorders left out, by worker; noted in the file.
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
