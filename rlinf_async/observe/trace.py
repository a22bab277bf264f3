"""Spans: what a worker did, from when, for how long; and the Perfetto file made of them.

Every worker has its own `SpanRecorder` and hands its spans on with `take`; the run merges them by
time alone. Times are of ``CLOCK_MONOTONIC`` in nanoseconds, which all processes of a host share;
those of other hosts are aligned where they arrive (`rlinf_async.observe.clocks`).

Invariant: a span is either in what `take` returns, once, or counted in ``left_out``.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import Final

import msgspec

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
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()

    def span(self, name: str, /, **args: Argument) -> _Recording:
        """A context manager that records its block as one span, also when the block raises."""
        return _Recording(self, name, args or None)

    def doing(self) -> tuple[str, ...]:
        """The names of the open spans, a name as often as it is open, without waits."""
        with self._lock:
            return tuple(name for name in self._open.elements() if not is_waiting(name))

    def count(self, name: str, change: int) -> None:
        """Note that a span of this name was opened (1) or closed (-1)."""
        with self._lock:
            self._open[name] += change

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
        self._recorder.count(self._name, 1)
        self._start = self._recorder.clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        start = self._start
        self._recorder.count(self._name, -1)
        self._recorder.add(self._name, start, self._recorder.clock() - start, self._args)
