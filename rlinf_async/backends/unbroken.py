"""Work that is not left half done when whoever waits for it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class Unbroken:
    """Carries work to its end. An error that nobody waits for any more is dropped."""

    def __init__(self) -> None:
        self._under_way = set[asyncio.Task[Any]]()

    async def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Wait for the work; a cancellation ends the wait only."""
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        finally:
            del task  # or its error would hold this frame, and with it all that the work had

    async def ended(self) -> None:
        """Wait until nothing is under way."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio would report one that nobody has looked at
