"""`Pace`: runs a worker's blocking work on the event loop while it is short, else in its thread.

A switch to the compute thread and back costs more than a step of a light environment, or the
forward pass of a small network; and while a thread computes, it and the loop contend for the
interpreter. But work that takes much longer than a switch must not block the event loop. How long
it takes is only known when it runs, and may change. So each kind of work is measured, and runs::

    first, and while it is long  ->  in the compute thread
    once it computed little      ->  on the event loop, on trial
    too long there               ->  in the compute thread; each trial comes later than the last

Invariant: no two pieces of one `Pace` run at the same time, however often callers are cancelled.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

from rlinf_async.workers.base import Worker

P = ParamSpec("P")
R = TypeVar("R")
Clock = Callable[[], float]

SHORT: Final = 0.001
"""seconds; some ten times the cost of a switch, and far below a noticeable block of the loop"""

NEVER_TRIED: Final = 20
"""times ``SHORT``: work that took longer in the thread, waits included, gets no trial"""

LONGEST_INTERVAL: Final = 4096
"""largest number of runs in the thread between two trials"""


class Pace:
    """Runs the blocking work of one worker, one piece at a time."""

    def __init__(
        self,
        worker: Worker,
        *,
        short: float = SHORT,
        executor: ThreadPoolExecutor | None = None,
    ) -> None:
        """Work of less than ``short`` seconds runs on the loop; with 0 none ever does.

        ``executor`` has another thread than the worker's compute thread.
        """
        self._worker = worker
        self._executor = executor
        self._short = short
        self._kinds: dict[str, _Kind] = {}
        self._turn = threading.Lock()
        self._clocks: tuple[Clock, Clock] | None = None

    async def run(self, kind: str, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``fn`` on the loop or in the thread, as a span named ``kind`` of the trace."""
        found = self._kinds.get(kind)
        # The thread holds the lock where a caller was cancelled and left its work running there.
        if found is None or not found.on_loop or not self._turn.acquire(blocking=False):
            work: Callable[[], R] = partial(self._in_thread, kind, fn, *args, **kwargs)
            self._clocks = self._clocks or _clocks()
            if self._executor is not None:
                return await self._worker.compute_in(self._executor, work)
            return await self._worker.compute(work)
        wall = (self._clocks or _REAL)[0]
        started = wall()
        try:
            with self._worker.span(kind):
                return fn(*args, **kwargs)
        finally:
            self._turn.release()
            found.ran_on_loop(wall() - started, self._short)

    def _in_thread(self, kind: str, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        wall, cpu = self._clocks or _REAL
        with self._turn:
            started, computed = wall(), cpu()
            try:
                with self._worker.span(kind):
                    return fn(*args, **kwargs)
            finally:
                found = self._kinds.setdefault(kind, _Kind())
                found.ran_in_thread(wall() - started, cpu() - computed, self._short)


class _Kind:
    """Measurements of one kind of work."""

    __slots__ = ("_interval", "_until_trial", "on_loop")

    def __init__(self) -> None:
        self.on_loop = False
        self._interval = 1
        self._until_trial = 1

    def ran_in_thread(self, seconds: float, computed: float, short: float) -> None:
        """Count a run towards the next trial if it computed for less than ``short`` seconds.

        Its wall time says less: the loop's thread may have held the interpreter meanwhile.
        """
        if computed < short and seconds < short * NEVER_TRIED:
            self._until_trial -= 1
            self.on_loop = self._until_trial <= 0

    def ran_on_loop(self, seconds: float, short: float) -> None:
        """Stay on the loop if it took less than ``short`` seconds."""
        if seconds < short:
            self._interval = max(1, self._interval - 1)
            return
        self.on_loop = False
        self._interval = min(2 * self._interval, LONGEST_INTERVAL)
        self._until_trial = self._interval


_REAL: Final[tuple[Clock, Clock]] = (time.perf_counter, time.thread_time)


def _clocks() -> tuple[Clock, Clock]:
    """Return clocks for work in the thread: of wall time, and of CPU time.

    In virtual time work takes none, so that every run with a seed is the same.
    """
    loop = asyncio.get_running_loop()
    return (loop.time, loop.time) if getattr(loop, "virtual", False) else _REAL
