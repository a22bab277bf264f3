"""The event loops that asynchronous tests run on."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from rlinf_async.runtime.wakers import mark_internal
from rlinf_async.testing import explore, forbid_blocking, run_on

T = TypeVar("T")
Main = Callable[[], Coroutine[Any, Any, None]]

BLOCKED = 3.0
"""Seconds without an answer of the loop, after which a test has blocked it: far more than any step
takes, also where the machine is slow."""

LIMIT = 300.0
"""Seconds after which a test on a real loop hangs: it is cancelled, and its error says where it
waited. (A signal's handler cannot do that: what it raises, uvloop passes to nobody.)"""

SEEDS = range(20)
"""Schedules that each test is run under on the virtual loop."""


def asyncio_debug() -> asyncio.AbstractEventLoop:
    """asyncio, with its own checks on."""
    loop = asyncio.new_event_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = BLOCKED  # it would log what says nothing but that others work
    return loop


def uvloop() -> asyncio.AbstractEventLoop:
    """uvloop, which the runtime uses."""
    import uvloop

    return uvloop.new_event_loop()


def eager() -> asyncio.AbstractEventLoop:
    """asyncio whose tasks run up to their first wait before ``create_task`` returns."""
    loop = asyncio.new_event_loop()
    if sys.version_info >= (3, 12):
        loop.set_task_factory(asyncio.eager_task_factory)
    else:
        loop.set_task_factory(_start_at_once)
    return loop


def _start_at_once(
    loop: Any, coro: Coroutine[Any, Any, T] | Generator[Any, None, T], **options: Any
) -> asyncio.Task[T]:
    """Take a new task's first step out of the loop's queue and run it: eager tasks on 3.11."""
    task = asyncio.Task(coro, loop=loop, **options)
    if not loop.is_running():
        return task
    first_step: asyncio.Handle = loop._ready.pop()
    creator = asyncio.current_task(loop)
    if creator is not None:
        asyncio.tasks._leave_task(loop, creator)
    try:
        first_step._run()
    finally:
        if creator is not None:
            asyncio.tasks._enter_task(loop, creator)
    return task


FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio_debug,
    "uvloop": uvloop,
    "eager": eager,
}
VIRTUAL = "virtual"
"""Not one loop but a virtual one for each of `SEEDS`."""


def run_on_kind(kind: str, main: Main) -> None:
    """Run a test's body; fail it if it hung or blocked the loop, or if an error reached nobody."""
    if kind == VIRTUAL:
        explore(main, seeds=SEEDS)
        return
    loop = FACTORIES[kind]()
    with forbid_blocking(loop, limit=BLOCKED):
        run_on(loop, _limited(main))


async def _limited(main: Main) -> None:
    """A thread has the limit, which does not count as what can end a deadlock."""
    loop, task, expired = asyncio.get_running_loop(), asyncio.current_task(), threading.Event()
    assert task is not None

    def expire() -> None:
        expired.set()
        loop.call_soon_threadsafe(task.cancel)

    timer = threading.Timer(LIMIT, expire)
    mark_internal(timer)
    timer.start()
    try:
        await main()
    except asyncio.CancelledError as error:
        if not expired.is_set():
            raise
        raise TimeoutError(f"the test still waits, after {LIMIT:g} s") from error
    finally:
        timer.cancel()
        timer.join()
