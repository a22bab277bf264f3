"""Order of events on a real event loop: `Sequencer` runs steps of several tasks in a written order.

`wait_all_blocked` waits for a settled state, and `LoopWatch` finds code that keeps the loop from
answering. Nothing here sleeps to put events in order.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from rlinf_async.testing.virtual_loop import (
    Livelock,
    LoopBlocked,
    SequenceBroken,
    VirtualLoop,
    describe_tasks,
    is_waiting,
    unfinished,
)


class LoopWatch:
    """A thread that pings a running loop and records the stack of code that delays an answer.

    Works on asyncio and uvloop. ``limit`` is in seconds. Time in which the whole process was
    stopped (the watching thread too), or in which the loop's thread was ready but other processes
    had the cores, does not count.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, limit: float = 0.5) -> None:
        self.findings: list[str] = []
        self._loop = loop
        self._limit = limit
        self._loop_thread = threading.get_ident()
        self._folder = f"/proc/self/task/{threading.get_native_id()}"
        self._ran = self._ran_at = 0.0
        self._answered = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)

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
            self.findings.append(self._stack())
            self._answered.wait()  # one finding for one block

    def _wait_for_answer(self) -> bool:
        """Wait in tenths of the limit, each of which counts once, however long it took."""
        tenth, before, waited = self._limit / 10, self._starved(), 0
        while not self._answered.wait(tenth):
            waited += 1
            if waited >= 10 and waited * tenth - (self._starved() - before) >= self._limit:
                return False
        return True

    def _starved(self) -> float:
        """Seconds for which the loop's thread was ready to run and got no core; 0 where the system
        does not report them."""
        try:
            with open(f"{self._folder}/schedstat", "rb") as file:
                ran, waited = (int(field) / 1e9 for field in file.read().split()[:2])
            with open(f"{self._folder}/stat", "rb") as file:
                ready = file.read().rpartition(b")")[2].split()[0] == b"R"
        except (OSError, IndexError, ValueError):
            return 0.0
        now = time.monotonic()
        if not ready or ran != self._ran:
            self._ran, self._ran_at = ran, now
        return waited + now - self._ran_at  # the system adds a wait once it is over

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        where = "".join(traceback.format_stack(frame)[-6:]) if frame else "  (its thread has ended)"
        return f"the event loop did not answer for {self._limit:.2f} s; it stood in\n{where}"


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
        raise LoopBlocked("\n".join(watch.findings))


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
