"""Order of events on a real event loop: `Sequencer` runs steps of several tasks in a written order.

`wait_all_blocked` waits for a settled state, and `forbid_blocking` finds code that keeps the loop
from answering. Nothing here sleeps to put events in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from rlinf_async.deadlines import LoopWatch
from rlinf_async.testing.virtual_loop import (
    Livelock,
    LoopBlocked,
    SequenceBroken,
    VirtualLoop,
    describe_tasks,
    is_waiting,
    unfinished,
)


@contextmanager
def forbid_blocking(
    loop: asyncio.AbstractEventLoop, *, limit: float = 0.5
) -> Iterator[LoopWatch | None]:
    """Raise `LoopBlocked` on leaving if the loop was kept from answering for ``limit`` seconds.

    Enter it in the thread that runs the loop, before or while it runs. A `VirtualLoop` is not
    watched: compute runs inline there. An error of the block itself is raised as it is.
    """
    if isinstance(loop, VirtualLoop):
        yield None
        return
    watch = LoopWatch(loop, limit=limit)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
    if watch.findings:
        said = f"the event loop did not answer for {limit:.2f} s; it stood in"
        raise LoopBlocked("\n".join(f"{said}\n{stack}" for stack in watch.findings))


class Sequencer:
    """Steps in numeric order, whichever tasks they are in.

    ``async with sequence(2):`` waits until the block of step 1 has been left, normally or by an
    exception. Step 0 does not wait. Raises `SequenceBroken` when a step is entered twice, and in
    every step that waits, or comes later, once a step has been cancelled while it waited.
    """

    def __init__(self) -> None:
        self._left: dict[int, asyncio.Event] = {}
        self._entered: set[int] = set()
        self._abandoned: int | None = None

    @asynccontextmanager
    async def __call__(self, step: int) -> AsyncIterator[None]:
        """Wait for the turn of ``step``; the next step may go on when the block is left."""
        self._enter(step)
        await self._turn_of(step)
        try:
            yield
        finally:
            self._event(step).set()

    def _enter(self, step: int) -> None:
        if step < 0:
            raise SequenceBroken(f"step {step}: steps are numbered from 0")
        if step in self._entered:
            raise SequenceBroken(f"step {step} was entered twice: give each step its own number")
        self._entered.add(step)

    async def _turn_of(self, step: int) -> None:
        self._refuse_if_abandoned(step)
        if step == 0:
            return
        try:
            await self._event(step - 1).wait()
        except asyncio.CancelledError:
            self._abandon(step)
            raise
        self._refuse_if_abandoned(step)

    def _event(self, step: int) -> asyncio.Event:
        return self._left.setdefault(step, asyncio.Event())

    def _abandon(self, step: int) -> None:
        if self._abandoned is None:
            self._abandoned = step
        for event in self._left.values():
            event.set()

    def _refuse_if_abandoned(self, step: int) -> None:
        if self._abandoned is not None:
            raise SequenceBroken(
                f"step {step} cannot run: step {self._abandoned} was cancelled while it waited"
            )


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
