"""`AgentClock`: a limit on the time that an agent takes, without that of the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from rlinf_async.deadlines import Timer


class AgentClock:
    """Seconds that an agent and its tools may take; they stand still while the model answers.

    ::

        agent   ===|           |===|      |==
        model      |===========|   |======|
        counted ===            ===        ==

    Args:
        seconds: the limit.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.expired = False
        """whether the limit has run out"""
        self._left = seconds
        self._timer: Timer | None = None
        self._scope: asyncio.Timeout | None = None
        self._answers = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Cancel the block when the limit runs out, and raise TimeoutError, as `asyncio.timeout`
        does."""
        # Its own deadline never comes: a stall of this process runs no limit out (`Timer`).
        async with asyncio.timeout(None) as self._scope:
            self._go_on()
            try:
                yield
            finally:
                self._stop()
                self._scope = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let no time count while the block runs; of several at once, until the last has ended."""
        self._answers += 1
        self._stop()
        try:
            yield
        finally:
            self._answers -= 1
            self._go_on()

    def _go_on(self) -> None:
        if self._scope is not None and not self._answers and not self.expired:
            self._timer = Timer(self._left, self._expire)

    def _stop(self) -> None:
        if self._timer is not None:
            self._left = self._timer.left
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self.expired, self._timer = True, None
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())
