"""Taking requests one by one, which can be stopped and started from outside.

Invariant: when `Taking.close` has returned, nothing is taken until `Taking.open`, and whatever was
taken before has been started. A wait for the next request ends without taking one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Step = Callable[[], Coroutine[Any, Any, bool]]
"""Takes one item and starts what is done with it; False when there is none left."""


class Taking:
    """The gate before a channel."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._steps: set[asyncio.Task[bool]] = set()

    def open(self) -> None:
        """Let items be taken again."""
        self._opened.set()

    async def close(self) -> None:
        """Take no more, and end the wait for the next one."""
        self._opened.clear()
        steps = list(self._steps)
        for step in steps:
            step.cancel()
        if steps:
            await asyncio.wait(steps)

    async def run(self, step: Step) -> None:
        """Take one after the other until there are none left. A step that is cancelled took none.

        Raises what a step raises.
        """
        while True:
            await self._opened.wait()
            taking = asyncio.create_task(step())
            self._steps.add(taking)
            try:
                if not await taking:
                    return
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
            finally:
                self._steps.discard(taking)
            if _is_cancelled():  # it came too late to end the step
                raise asyncio.CancelledError


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
