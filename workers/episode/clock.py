"""`AgentClock`: a limit on the time that an agent takes, without that of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
        self.since: float | None = None
        """when the agent went on, by the loop's clock; None: it has ended, or the model draws"""
        self._left = seconds
        self._timer: Timer | None = None
        self._over: asyncio.Future[None] | None = None
        """done once the limit has run out; None: nobody waits for it"""
        self._answers = 0

    async def wait(self, agent: asyncio.Future[Any]) -> bool:
        """Wait until an agent has ended, or the limit has run out; return whether it has ended."""
        self._over = over = asyncio.get_running_loop().create_future()
        self._go_on()
        try:
            await asyncio.wait({agent, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stop()
            self._over = None
        return agent.done()

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
        if self._over is not None and not self._answers and not self._over.done():
            self.since = asyncio.get_running_loop().time()
            # A stall of this process runs no limit out.
            self._timer = Timer(self._left, self._over.set_result, None)

    def _stop(self) -> None:
        if self._timer is not None:
            self._left = self._timer.left
            self._timer.cancel()
            self._timer = self.since = None
