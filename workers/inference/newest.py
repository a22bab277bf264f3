"""Reads weights ahead: whether newer ones came is known at once, wherever their channel lives.

Invariant: at most one question is open, and it stays open between two batches.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from rlinf_async.channels import EndOfChannel, LatestReceiver
from rlinf_async.messages.weights import WeightUpdate


class Newest:
    """The newest weights. A context manager: the open question is taken back when it is left."""

    def __init__(self, weights: LatestReceiver[WeightUpdate]) -> None:
        self._weights = weights
        self._asked: asyncio.Task[WeightUpdate] | None = None

    async def newer(self, *, wait: bool) -> WeightUpdate | None:
        """Weights newer than those that were returned before.

        Args:
            wait: for them; else None is returned where none have come.

        Raises:
            EndOfChannel: none will come, and they are waited for.
        """
        if self._asked is None:
            self._asked = asyncio.create_task(self._weights.get(), name="newest weights")
            await asyncio.sleep(0)  # in one process that is enough for those that are there
        if not (wait or self._asked.done()):
            return None
        try:
            update = await self._asked
        except EndOfChannel:
            if wait:
                raise
            return None
        self._asked = None
        return update

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._asked is None:
            return
        if not self._asked.cancel() and not self._asked.cancelled():
            self._asked.exception()  # looked at: an end that nobody had to wait for
