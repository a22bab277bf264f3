"""Whether this process stands still: could it make progress by itself?

A task is *blocked* if what it awaits can be ended by others only: a wait on a channel, another
task, of which the same is asked, or a computation that itself waits for a task. Anything else (a
timer, a socket, a thread, a future of which nothing is known) may end by itself, and then the task
does not count as blocked. Where all tasks are, something outside them may still wake one: see
`wakers`. So "stands still" is certain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import CoroutineType
from typing import Any, TypeVar

from rlinf_async.channels.waitfor import WaitFuture, computations, until_done
from rlinf_async.runtime.wakers import find_wakers, is_internal, mark_internal

R = TypeVar("R")


class WorkFuture(asyncio.Future[Any]):
    """A future that only a worker can complete: what a task awaits while a worker runs its call."""


class WorkEvent:
    """As `asyncio.Event`, for what only workers, or other tasks of this process, can bring about.

    A task that waits for it is blocked; one that waits for an `asyncio.Event` is not, since a timer
    or a signal may set that.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[WorkFuture] = []

    def set(self) -> None:
        """Wake all that wait."""
        self._set = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def clear(self) -> None:
        """Let later waits wait for the next `set`."""
        self._set = False

    async def wait(self) -> None:
        """Wait until it is set."""
        if self._set:
            return
        waiter = WorkFuture()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)


async def result_of(future: asyncio.Future[R]) -> R:
    """Await a future that others await too: cancelling this wait does not cancel the future."""
    await until_done(future)
    return future.result()


def internal(task: asyncio.Task[Any]) -> asyncio.Task[Any]:
    """Mark a task as the runtime's own: it serves others and never makes progress by itself."""
    mark_internal(task)
    return task


def current_is_internal() -> None:
    """Mark the running task as the runtime's own."""
    task = asyncio.current_task()
    if task is not None:
        internal(task)


def what_can_go_on() -> str:
    """What could let this process go on though nobody else does, in a few words; "" for nothing."""
    return free_task(asyncio.all_tasks()) or next(find_wakers(), "")


def free_task(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """One of these tasks that is neither blocked nor the runtime's own; "" for none."""
    for task in tasks:
        if not (task.done() or is_internal(task) or is_blocked(task)):
            what = getattr(task.get_coro(), "__qualname__", "")
            return f"task {task.get_name()!r} ({what}) may go on by itself"
    return ""


def is_blocked(task: asyncio.Task[Any]) -> bool:
    """Whether only others can wake this task."""
    awaited = getattr(task, "_fut_waiter", None)
    if awaited is None:
        return task is asyncio.current_task()  # runnable
    if awaited.done():
        return False  # woken, and about to run
    if isinstance(awaited, (WaitFuture, WorkFuture, asyncio.Task)):
        return True
    thread = computations.get(awaited) if isinstance(awaited, asyncio.Future) else None
    if thread is not None:
        return thread.waits > 0
    children = getattr(awaited, "_children", None)  # asyncio.gather
    if children is not None:
        return all(isinstance(one, (asyncio.Task, WaitFuture, WorkFuture)) for one in children)
    return _leaves_task_group(task)


def _leaves_task_group(task: asyncio.Task[Any]) -> bool:
    """Whether the task is at the end of an ``async with TaskGroup()``, waiting for its children."""
    inner: Any = task.get_coro()
    while isinstance(getattr(inner, "cr_await", None), CoroutineType):
        inner = inner.cr_await
    code = getattr(inner, "cr_code", None)
    exit_ = getattr(asyncio.TaskGroup, "_aexit", asyncio.TaskGroup.__aexit__)  # Python 3.13
    return code is exit_.__code__
