"""Limits on how long somebody else may take, which a stall of this process does not run out.

Where this process was stopped (Ctrl-Z), its event loop blocked, or its core taken, a limit by the
clock alone ends before what the others did meanwhile was read. So here a limit is a number of
looks, an eighth of it apart. A look that comes late counts for a quarter of one, however late: the
next ones see what was read since. It does count, or else a loop that is always late would wait for
ever.

::

    looks     1   2   3   4           5       6   7   8   9
    time  ----+---+---+---+--stopped--+-------+---+---+---+ over
    counted   1   2   3   4           4 1/4   ...      8 1/4

There is no timer but the one for the next look, and none where nothing is limited.

`LoopWatch`: the limit on how long an event loop of this process may take to answer.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

LOOKS: Final = 8
"""looks until a limit runs out, if none is late"""
_PUNCTUAL: Final = 4
"""quarters for which a punctual look counts; a late one counts for one"""


class Patience:
    """Time left of a limit of ``seconds``, for a caller that looks each time when it is `due`.

    ``every``: seconds between two looks, where it is not to be an eighth.
    """

    __slots__ = ("_every", "_left", "_loop", "_whole", "due")

    def __init__(self, seconds: float, every: float | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._every = seconds / LOOKS if every is None else every
        self._whole = _PUNCTUAL * (LOOKS if every is None else math.ceil(seconds / every))
        self.renew()

    def renew(self) -> None:
        """Begin the limit again, now."""
        self._left = self._whole
        self.due = self._loop.time() + self._every

    def look(self) -> bool:
        """Count a look; return whether the limit has run out."""
        now = self._loop.time()
        late = now - self.due > self._every
        self._left -= 1 if late else _PUNCTUAL
        self.due = (now if late else self.due) + self._every
        return self._left <= 0

    @property
    def left(self) -> float:
        """Seconds until the limit runs out, if no look is late."""
        looks = math.ceil(self._left / _PUNCTUAL)
        if looks <= 0:
            return 0.0
        until_next = min(max(self.due - self._loop.time(), 0.0), self._every)
        return (looks - 1) * self._every + until_next


class Timer:
    """Calls back after ``seconds``, as ``loop.call_later`` does, unless it is cancelled."""

    __slots__ = ("_handle", "_loop", "_patience")

    def __init__(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._patience = Patience(seconds)
        self._wait(callback, args)

    @property
    def left(self) -> float:
        """Seconds until the callback, if nothing stalls."""
        return self._patience.left

    def cancel(self) -> None:
        """Do not call back any more."""
        self._handle.cancel()

    def _wait(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        # The handle alone holds the callback: it lets go of it when it is cancelled.
        self._handle = self._loop.call_at(self._patience.due, self._look, callback, args)

    def _look(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self._patience.look():
            callback(*args)
        else:
            self._wait(callback, args)


class ProgressTimer:
    """Calls back once a measure has not changed for so many seconds.

    Args:
        measure: what changes while there is progress. It is compared with its last value.
        stalled: called once, with that value.
    """

    def __init__(
        self, seconds: float, measure: Callable[[], Any], stalled: Callable[[Any], object]
    ) -> None:
        self._seconds = seconds
        self._measure = measure
        self._stalled = stalled
        self._start()

    def cancel(self) -> None:
        """Do not call."""
        self._timer.cancel()

    def _start(self) -> None:
        self._timer = Timer(self._seconds, self._look, self._measure())

    def _look(self, before: Any) -> None:
        if self._measure() == before:
            self._stalled(before)
        else:
            self._start()


@asynccontextmanager
async def timeout(seconds: float) -> AsyncIterator[None]:
    """Cancel what takes longer than ``seconds``, and raise TimeoutError, as ``asyncio.timeout``
    does."""
    loop = asyncio.get_running_loop()
    # Its own deadline never comes, but says to `runtime.wakers` that the task can go on by itself.
    async with asyncio.timeout(math.inf) as scope:
        timer = Timer(seconds, lambda: scope.reschedule(loop.time()))
        try:
            yield
        finally:
            timer.cancel()


_here = threading.local()
"""by thread: the function that takes seconds instead of sleeping them"""


@contextmanager
def taking_time(take: Callable[[float], None]) -> Iterator[None]:
    """Give the seconds that the block lets pass to ``take``; a loop runs the block inline.

    Not by a context variable: whoever runs the code may do so in a context that was copied before.
    """
    _here.take = take
    try:
        yield
    finally:
        _here.take = None


def let_pass(seconds: float) -> None:
    """Take ``seconds``, or none if they are not above 0.

    ::

        in a thread                 the thread sleeps
        inline, on a virtual loop   nothing sleeps: whoever waits for the result gets it so
                                    much later, by that loop's clock
    """
    if seconds <= 0.0:
        return
    take: Callable[[float], None] | None = getattr(_here, "take", None)
    if take is None:
        time.sleep(seconds)
    else:
        take(seconds)


class LoopWatch:
    """A thread that pings a running loop, and reports the stack of code that delays an answer.

    Works on asyncio and uvloop. Time in which the whole process was stopped (the watching thread
    too), or in which the loop's thread was ready but other processes had the cores, does not count.

    Args:
        loop: it runs in the thread that makes this.
        limit: seconds that an answer may take.
        report: called in the watching thread with the stack, once for each block; by default the
            stacks are kept in ``findings``.
        name: name of the watching thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        limit: float = 0.5,
        report: Callable[[str], None] | None = None,
        name: str = "loop-watch",
    ) -> None:
        self.findings: list[str] = []
        self._report = report or self.findings.append
        self._loop = loop
        self._limit = limit
        self._loop_thread = threading.get_ident()
        self._folder = f"/proc/self/task/{threading.get_native_id()}"
        self._ran = self._ran_at = 0.0
        self._answered = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    def start(self) -> None:
        """Begin to ping; the calling thread must be the one that runs the loop."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopped.set()
        self._answered.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._limit / 10):
            if self._loop.is_running() and not self._loop.is_closed():
                self._ping()

    def _ping(self) -> None:
        self._answered.clear()
        if self._stopped.is_set():  # `stop` sets both: do not wait for what was just cleared
            return
        try:
            self._loop.call_soon_threadsafe(self._answered.set)
        except RuntimeError:  # closed in the meantime
            return
        if not self._wait_for_answer() and self._loop.is_running():
            self._report(self._stack())
            self._answered.wait()  # one report for one block

    def _wait_for_answer(self) -> bool:
        """Wait in tenths of the limit, each of which counts once, however long it took; or until
        the loop's thread has computed for the limit, as a call does that holds the interpreter lock
        and so keeps this thread from counting."""
        tenth, waited = self._limit / 10, 0
        ran_before, starved_before = self._times()
        while not self._answered.wait(tenth):
            waited += 1
            ran, starved = self._times()
            if ran - ran_before >= self._limit:
                return False
            if waited >= 10 and waited * tenth - (starved - starved_before) >= self._limit:
                return False
        return True

    def _times(self) -> tuple[float, float]:
        """Seconds for which the loop's thread ran, and for which it was ready to run and got no
        core; 0 where the system does not report them."""
        try:
            with open(f"{self._folder}/schedstat", "rb") as file:
                ran, waited = (int(field) / 1e9 for field in file.read().split()[:2])
            with open(f"{self._folder}/stat", "rb") as file:
                ready = file.read().rpartition(b")")[2].split()[0] == b"R"
        except (OSError, IndexError, ValueError):
            return 0.0, 0.0
        now = time.monotonic()
        if not ready or ran != self._ran:
            self._ran, self._ran_at = ran, now
        # The system adds a wait once it is over.
        return ran, waited + now - self._ran_at

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        return "".join(traceback.format_stack(frame)[-12:]) if frame else "  (its thread has ended)"
