"""Wait until every other task waits, so that a test can look at a settled state."""

from __future__ import annotations

import asyncio
from typing import Any

from rlinf_async.testing.errors import Livelock
from rlinf_async.testing.report import describe_tasks, is_waiting, unfinished
from rlinf_async.testing.virtual_loop import VirtualLoop

QUIET_TURNS = 8
"""turns of a real loop in a row without a runnable task; a wake-up through callbacks takes some"""

_callers: set[asyncio.Task[Any]] = set()


async def wait_all_blocked(*, max_turns: int = 100_000) -> None:
    """Return once every other task waits for something that only a timer, I/O or a caller can end.

    A sleeping task waits. On a `VirtualLoop` the answer is exact; on a real loop (asyncio, uvloop)
    it holds for what tasks and callbacks do, but a thread or another process may still be at work.
    Raises `Livelock` when some task is still runnable after ``max_turns`` turns of a real loop.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualLoop):
        await loop.until_idle()
        return
    caller = asyncio.current_task()
    if caller is None:
        raise RuntimeError("wait_all_blocked() needs a task: call it from a coroutine")
    _callers.add(caller)
    try:
        await _wait_for_quiet(loop, max_turns)
    finally:
        _callers.discard(caller)


async def _wait_for_quiet(loop: asyncio.AbstractEventLoop, max_turns: int) -> None:
    quiet = 0
    for _ in range(max_turns):
        quiet = 0 if _runnable(loop) else quiet + 1
        if quiet == QUIET_TURNS:
            return
        await asyncio.sleep(0)
    busy = describe_tasks(_runnable(loop))
    raise Livelock(f"after {max_turns} turns of the loop these tasks still run:\n{busy}")


def _runnable(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    return [task for task in unfinished(loop) if task not in _callers and not is_waiting(task)]
