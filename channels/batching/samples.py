"""A queue of samples, filled and emptied in batches of any size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from rlinf_async.channels.batching.operations import BatchOps, join

B = TypeVar("B")


class SampleQueue(Generic[B]):
    """Samples in order of arrival. A batch is sliced where a requested count ends inside it."""

    def __init__(self, ops: BatchOps[B]) -> None:
        self._ops = ops
        self._batches: deque[tuple[B, int]] = deque()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, batch: B) -> None:
        """Queue the samples of a batch; a batch without samples is ignored."""
        size = self._ops.size(batch)
        if size:
            self._batches.append((batch, size))
            self._size += size

    def put_back(self, batches: Iterable[B]) -> None:
        """Queue batches, in their order, at the head of the queue."""
        for batch in reversed(list(batches)):
            size = self._ops.size(batch)
            self._batches.appendleft((batch, size))
            self._size += size

    def peek(self, count: int) -> B:
        """The first ``count`` samples (at least 1, at most ``len``), which stay queued."""
        pieces: list[B] = []
        for batch, size in self._batches:
            if size > count:
                pieces.append(self._ops.slice(batch, 0, count))
                break
            pieces.append(batch)
            count -= size
            if count == 0:
                break
        return join(self._ops, pieces)

    def drop(self, count: int) -> None:
        """Remove the first ``count`` samples (at most ``len``)."""
        self._size -= count
        while count:
            batch, size = self._batches.popleft()
            if size > count:
                self._batches.appendleft((self._ops.slice(batch, count, size), size - count))
                return
            count -= size
