"""Memory of arrays that arrived before, for those that arrive next.

Memory that goes back to the system costs more to get again than an array's bytes cost to receive:
each page is cleared, and mapped at its first write. So some of the last arrays' memory is kept, and
used again for an array of the same size once nothing else refers to it.

Invariant: a buffer is taken only while this is all that refers to it. Views, slices, numpy arrays
and torch tensors over it refer to it, in any thread, for as long as they live.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict, deque
from typing import Final

RECYCLED_BYTES: Final = 64 * 1024
"""Smaller arrays are not kept: the heap has memory for them."""
KEPT_BYTES: Final = 64 * 1024**2
"""of one thread, at most, that nothing else may refer to"""
_ALONE: Final = 2
"""What `sys.getrefcount` says of an object that one name refers to."""


class Recycled:
    """The memory that the event loop of one thread keeps."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._by_size: OrderedDict[int, deque[bytearray]] = OrderedDict()
        self.kept_bytes = 0

    def take(self, size: int) -> bytearray | None:
        """A buffer of this size with any contents, which is kept no more; None if none is free."""
        kept = self._by_size.get(size)
        for _ in range(0 if kept is None else len(kept)):
            assert kept is not None
            buffer = kept.popleft()
            if sys.getrefcount(buffer) == _ALONE:
                self._by_size.move_to_end(size)
                self._forget(size, kept)
                return buffer
            kept.append(buffer)
        return None

    def keep(self, buffer: bytearray) -> None:
        """Use this again when nobody else does. The sizes that were not asked for longest, and the
        oldest of a size, make room for it."""
        size = len(buffer)
        if not RECYCLED_BYTES <= size <= self._limit:
            return
        self._by_size.setdefault(size, deque()).append(buffer)
        self._by_size.move_to_end(size)
        self.kept_bytes += size
        while self.kept_bytes > self._limit:
            oldest, kept = next(iter(self._by_size.items()))
            kept.popleft()
            self._forget(oldest, kept)

    def _forget(self, size: int, kept: deque[bytearray]) -> None:
        """One buffer of this size is kept no more."""
        self.kept_bytes -= size
        if not kept:
            del self._by_size[size]


_of_thread: Final = threading.local()


def thread_recycled() -> Recycled:
    """That of this thread, and so of its event loop."""
    found: Recycled | None = getattr(_of_thread, "recycled", None)
    if found is None:
        found = _of_thread.recycled = Recycled()
    return found
