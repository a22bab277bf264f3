"""Runs one pull: on the event loop, or in a compute thread.

A pull is a coroutine that passes every awaitable to a `Wait`. On the loop, `wait_here` awaits the
awaitable. In a thread, `ThreadDriver` submits the awaitable to the loop and blocks, so the
coroutine itself never suspends: the coroutine, and every plain handler that it calls, run in the
thread that pulls. `BlockingBatches` is the blocking view of the iterator, for a training loop or
pipeline schedule in a compute thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from threading import Lock
from typing import Any, Generic, Protocol, Self, TypeVar

from rlinf_async.channels.errors import EndOfChannel, PullCancelled
from rlinf_async.channels.statistics import current_thread, until_done

R = TypeVar("R")


class Wait(Protocol):
    """Waits for an awaitable on the event loop."""

    def __call__(self, awaitable: Awaitable[R], /) -> Awaitable[R]: ...


async def wait_here(awaitable: Awaitable[R]) -> R:
    """Wait on the running loop."""
    return await awaitable


class Calls:
    """The handlers' calls of one iterator, one at a time. A call whose pull is cancelled goes on,
    and the next pull waits for it: so ranks that do something together in a handler stay in step,
    however often each of them is cancelled."""

    def __init__(self) -> None:
        self._at: tuple[str, int] | None = None
        self._begun: Awaitable[Any] | None = None
        """what an async function returned for the call under way"""
        self._task: asyncio.Task[Any] | None = None
        """awaits that"""

    async def result(
        self, at: tuple[str, int], call: Callable[[], R | Awaitable[R]], wait: Wait
    ) -> R:
        """The result of a function that may be plain or async. ``at`` names which one, and what it
        is called for: the call under way is that of an earlier pull only if it has the same name.
        """
        if self._begun is not None and self._at != at:
            await self._end(wait)  # nobody asks for this result any more
        if self._begun is None:
            value = call()
            if not inspect.isawaitable(value):
                return value
            self._at, self._begun = at, value
        ended: asyncio.Task[R] = await self._end(wait)
        return ended.result()

    def forget(self, *which: str) -> None:
        """What is under way of these handlers is not for what they will be called for next."""
        if self._at is not None and self._at[0] in which:
            self._at = None

    async def _end(self, wait: Wait) -> asyncio.Task[Any]:
        """The call under way, once it is done. A cancellation ends only this wait for it."""
        ended = await wait(self._wait_on_loop())
        self._begun = self._task = None
        return ended

    async def _wait_on_loop(self) -> asyncio.Task[Any]:
        if self._task is None:
            assert self._begun is not None
            self._task = asyncio.ensure_future(wait_here(self._begun))
        await until_done(self._task)
        return self._task


class ThreadDriver:
    """Runs pulls in the calling thread and their waits on ``loop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = Lock()
        self._waiting: Future[Any] | None = None
        self._closed = False

    def run(self, pull: Callable[[Wait], Coroutine[Any, Any, R]]) -> R:
        """The result of one pull.

        Raises:
            PullCancelled: `close` was called before or during the wait, or the loop ended.
            RuntimeError: called on the loop's own thread, which would wait for itself.
        """
        if _running_loop() is self._loop:
            raise RuntimeError(
                "a blocking pull on its own event loop would wait for itself for ever: use "
                "`async for` here, or pull from a thread (`await worker.compute(...)`)"
            )
        coroutine = pull(self._wait)
        try:
            coroutine.send(None)
        except StopIteration as done:
            result: R = done.value
            return result
        coroutine.close()
        raise RuntimeError("the pull awaited without its Wait")

    def close(self) -> None:
        """End the pull that waits now, if any, and every later one. From any thread."""
        with self._lock:
            self._closed = True
            if self._waiting is not None:
                self._waiting.cancel()

    async def _wait(self, awaitable: Awaitable[R]) -> R:
        future = self._submit(awaitable)
        try:
            return future.result()
        except CancelledError:
            raise PullCancelled(
                "the wait for the next batch was cancelled: the blocking view was closed or its "
                "event loop is stopping"
            ) from None
        finally:
            # An interrupt (Ctrl-C) in this thread must not leave the wait running on the loop.
            future.cancel()
            self._waiting = None

    def _submit(self, awaitable: Awaitable[R]) -> Future[R]:
        with self._lock:
            if self._closed or self._loop.is_closed():
                if inspect.iscoroutine(awaitable):
                    awaitable.close()
                what = "the blocking view" if self._closed else "its event loop"
                raise PullCancelled(f"{what} was closed: no further batch can be waited for")
            self._waiting = asyncio.run_coroutine_threadsafe(for_thread(awaitable), self._loop)
            return self._waiting


async def for_thread(awaitable: Awaitable[R]) -> R:
    """Wait on the loop for a thread, which does not compute meanwhile."""
    thread = current_thread.get()
    if thread is None:
        return await awaitable
    thread.waits += 1
    try:
        return await awaitable
    finally:
        thread.waits -= 1


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:  # an ordinary thread
        return None


B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


class Pulls(Protocol[B_co]):
    """The methods of the iterator that the view calls; each awaits through a `Wait`."""

    @property
    def finished_global_batch(self) -> bool: ...

    def pull(self, wait: Wait, /) -> Coroutine[Any, Any, B_co]: ...

    def peek(self, wait: Wait, /) -> Coroutine[Any, Any, B_co]: ...

    def count(self, wait: Wait, /) -> Coroutine[Any, Any, int]: ...


class BlockingBatches(Generic[B]):
    """A blocking view of a `BatchResizingIterator`: the same batches, by ``next()``.

    It shares all state with the iterator; only one of the two may pull at a time. Plain handlers
    and a plain ``agree`` run in the calling thread, async ones on the event loop: async ones must
    not need the thread that waits for their results.

    Raises `PullCancelled` from a pull that was ended by ``close()`` (from any thread) or by the end
    of the loop, and RuntimeError when called on the loop's own thread.
    """

    def __init__(self, iterator: Pulls[B], loop: asyncio.AbstractEventLoop) -> None:
        self._iterator = iterator
        self._driver = ThreadDriver(loop)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> B:
        try:
            return self._driver.run(self._iterator.pull)
        except EndOfChannel:
            raise StopIteration from None

    def global_batch(self) -> Iterator[B]:
        """The micro-batches up to the end of a global batch.

        Raises `EndOfChannel` when the channel ended before the global batch began.
        """
        last = False
        while not last:
            micro_batch = self._driver.run(self._iterator.pull)
            last = self._iterator.finished_global_batch
            yield micro_batch

    def peek(self) -> B:
        """The next micro-batch, which stays queued."""
        return self._driver.run(self._iterator.peek)

    def count(self) -> int:
        """Micro-batches left in the open, or else the next, global batch."""
        return self._driver.run(self._iterator.count)

    def close(self) -> None:
        """End the pull that waits now, if any, and every later one through this view."""
        self._driver.close()
