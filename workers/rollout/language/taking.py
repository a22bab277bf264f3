"""Taking requests one by one, with a gate that other calls close and open.

Invariant: when `Taking.close` has returned, nothing is taken until `Taking.open`, and whatever was
taken before has been started. A wait for the next request ends without taking one.

A task at a closed gate waits for others, so the deadlock watch sees a run in which nobody opens it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rlinf_async.channels.waitfor import WaitFuture

Step = Callable[[], Coroutine[Any, Any, bool]]
"""Takes one item and starts its work; False when there is none left."""


class Taking:
    """The gate before a channel."""

    def __init__(self) -> None:
        self._opened = True
        self._waiting: list[WaitFuture] = []
        self._steps: set[asyncio.Task[bool]] = set()

    def open(self) -> None:
        """Let items be taken again."""
        self._opened = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def close(self) -> None:
        """Take no more, and end the wait for the next one."""
        self._opened = False
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
            await self._gate()
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
            if _is_cancelled():  # the cancellation came too late to end the step
                raise asyncio.CancelledError

    async def _gate(self) -> None:
        while not self._opened:
            waiting = WaitFuture(loop=asyncio.get_running_loop())
            self._waiting.append(waiting)
            try:
                await waiting
            finally:
                self._waiting.remove(waiting)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
