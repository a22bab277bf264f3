"""Where a worker's blocking work runs: on the event loop while it is short, else in its thread.

A hop to the compute thread and back costs more than a step of a light environment, or the forward
pass of a small network. Work that takes longer than a hop by far must not keep the event loop from
answering. Which of the two a piece of work is, is only known once it has run, and may change: so it
is measured, per kind of work::

    first time, or long lately  ->  compute thread
    short lately                ->  event loop

Invariant: no two pieces of one `Pace` run at the same time, however often callers are cancelled.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, ParamSpec, TypeVar

from rlinf_async.workers.base import Worker

P = ParamSpec("P")
R = TypeVar("R")

SHORT: Final = 0.001
"""seconds; some ten times what a hop costs, and far below what anybody notices of a busy loop"""

FORGET: Final = 0.1
"""how fast a slow piece is forgiven; a slow one counts at once"""


class Pace:
    """Runs the blocking work of one worker, one piece at a time."""

    def __init__(self, worker: Worker, *, short: float = SHORT) -> None:
        """Work that takes ``short`` seconds or less runs on the loop; with 0 none ever does."""
        self._worker = worker
        self._short = short
        self._seconds: dict[str, float] = {}
        self._turn = threading.Lock()
        self._clock: Callable[[], float] | None = None

    async def run(self, kind: str, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``fn`` where work of this kind belongs, as a span named ``kind`` of the trace."""
        # A thread has the turn if a caller was cancelled and left its work running there.
        if self.is_short(kind) and self._turn.acquire(blocking=False):
            try:
                return self._timed(kind, fn, *args, **kwargs)
            finally:
                self._turn.release()
        if self._clock is None:
            self._clock = _clock()
        work: Callable[[], R] = partial(self._in_turn, kind, fn, *args, **kwargs)
        return await self._worker.compute(work)

    def is_short(self, kind: str) -> bool:
        """Whether work of this kind runs on the event loop for now."""
        return self._seconds.get(kind, math.inf) < self._short

    def _in_turn(self, kind: str, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turn:
            return self._timed(kind, fn, *args, **kwargs)

    def _timed(self, kind: str, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        clock = self._clock or time.perf_counter
        start = clock()
        try:
            with self._worker.span(kind):
                return fn(*args, **kwargs)
        finally:
            seconds = clock() - start
            known = self._seconds.get(kind, seconds)
            self._seconds[kind] = max(seconds, known + FORGET * (seconds - known))


def _clock() -> Callable[[], float]:
    """A clock for work; in virtual time work takes none, so that every run decides alike."""
    loop = asyncio.get_running_loop()
    return loop.time if getattr(loop, "virtual", False) else time.perf_counter
