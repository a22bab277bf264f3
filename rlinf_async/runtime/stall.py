"""Which tasks are blocked: could any of them make progress by itself?

A task is *blocked* if what it awaits can be ended by others only: a wait on a channel, another
task, of which the same is asked, or a computation that itself waits for a task. Anything else (a
timer, ``asyncio.timeout``, a socket, a thread) may end by itself, and then the task does not count
as blocked; so "blocked" is certain. (What cannot be seen: a timer of the user's own that cancels a
task.)
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable
from types import CoroutineType
from typing import Any, TypeVar
from weakref import WeakSet

from rlinf_async.channels.waitfor import WaitFuture, computations

R = TypeVar("R")

_internal: WeakSet[asyncio.Task[Any]] = WeakSet()


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
    if not future.done():
        mine: asyncio.Future[None] = WorkFuture()

        def wake(_: asyncio.Future[R]) -> None:
            if not mine.done():
                mine.set_result(None)

        future.add_done_callback(wake)
        try:
            await mine
        finally:
            future.remove_done_callback(wake)
    return future.result()


def internal(task: asyncio.Task[Any]) -> asyncio.Task[Any]:
    """Mark a task as the runtime's own: it serves others and never makes progress by itself."""
    _internal.add(task)
    return task


def current_is_internal() -> None:
    """Mark the running task as the runtime's own."""
    task = asyncio.current_task()
    if task is not None:
        internal(task)


def all_blocked(tasks: Iterable[asyncio.Task[Any]]) -> bool:
    """Whether every task that is not the runtime's own is blocked."""
    users = [task for task in tasks if task not in _internal and not task.done()]
    return all(is_blocked(task) for task in users) and _with_timeout().isdisjoint(users)


def _with_timeout() -> set[asyncio.Task[Any]]:
    """Tasks inside an ``asyncio.timeout`` that still runs. No loop lists them, so the heap is
    searched: some milliseconds, and only when all tasks are blocked otherwise.

    Only what refers to their type is held meanwhile. `gc.get_objects` would hold the tuples that
    other threads are just making, which fail if they are not the only ones to hold them
    (``SystemError: bad argument to internal function``).
    """
    every = [one for one in gc.get_referrers(asyncio.Timeout) if type(one) is asyncio.Timeout]
    return {vars(one)["_task"] for one in every if vars(one).get("_timeout_handler") is not None}


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
