"""Blocking view of the iterator, for a training loop or pipeline schedule in a compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, Generic, Protocol, Self, TypeVar

from rlinf_async.channels.batching.driving import ThreadDriver, Wait
from rlinf_async.channels.errors import EndOfChannel

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

    def prefetch_one_batch(self) -> B:
        """The next micro-batch, which stays queued."""
        return self._driver.run(self._iterator.peek)

    def count_micro_batches(self) -> int:
        """Micro-batches left in the open, or else the next, global batch."""
        return self._driver.run(self._iterator.count)

    def close(self) -> None:
        """End the pull that waits now, if any, and every later one through this view."""
        self._driver.close()
