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
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
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


@asynccontextmanager
async def timeout(seconds: float) -> AsyncIterator[None]:
    """Cancel what takes longer than ``seconds``, and raise TimeoutError, as ``asyncio.timeout``
    does."""
    loop = asyncio.get_running_loop()
    # Its own deadline never comes, but says to `runtime.stall` that the task can go on by itself.
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
