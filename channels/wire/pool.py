"""The shared memory of this process: a few slabs, whose parts are lent, returned, and lent again.

Invariant: a part is written only while no process has a view of it. A part whose borrower was lost
without a release is poisoned; its slab lends no more and is removed when the other parts are
returned, and the kernel frees the memory when the borrower, too, has unmapped it.

::

    slab:  lending --a part is poisoned--> draining --all parts are returned--> removed
           lending --no part is lent, and the limit leaves no memory for a larger slab--> removed
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Final

from rlinf_async.channels.encoded import PIECE_BYTES, copy_buffers
from rlinf_async.channels.wire.frames import Bytes
from rlinf_async.channels.wire.slab import PAGE, Loan, Slab, make_slab, view_of


class FreeList:
    """The free parts between two offsets, in order and never adjacent.

    First fit: the lowest part that is large enough is taken, so that the same memory, whose pages
    are allocated already, is used again and again.
    """

    def __init__(self, start: int, stop: int) -> None:
        self._whole = [(start, stop)]
        self._free = [(start, stop)]

    @property
    def idle(self) -> bool:
        """Whether all of the range is free."""
        return self._free == self._whole

    def take(self, size: int) -> int | None:
        """Take ``size`` bytes and return their offset; None where no free part is large enough."""
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                rest = [(start + size, stop)] if stop - start > size else []
                self._free[index : index + 1] = rest
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Free the ``size`` bytes that were taken at ``start``.

        Raises:
            ValueError: a part of these bytes is free, or lies outside of the range.
        """
        stop = start + size
        index = bisect_left(self._free, (start, stop))
        before = self._free[index - 1] if index else None
        after = self._free[index] if index < len(self._free) else None
        (low, high), overlaps = self._whole[0], (before and before[1] > start)
        if overlaps or (after and after[0] < stop) or start < low or stop > high or size < 1:
            raise ValueError(f"{size} bytes at {start} were not taken")
        first, last = index, index
        if before and before[1] == start:
            first, start = index - 1, before[0]
        if after and after[0] == stop:
            last, stop = index + 1, after[1]
        self._free[first:last] = [(start, stop)]


SLAB_BYTES: Final = 64 * 1024**2
POOL_BYTES: Final = 1024**3
"""limit of one process; further arrays go through the socket"""
ALIGN: Final = 64
"""bytes to which the start of each buffer is aligned"""

log = logging.getLogger(__name__)


class _PooledSlab:
    """A slab and its free parts."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.free = FreeList(PAGE, slab.size)
        self.draining = False

    def take(self, size: int, *, back: bool) -> int | None:
        """Take a part and return its offset; None where no free part is large enough.

        Args:
            size: in bytes.
            back: allocate its memory too.

        Raises:
            OSError: the system has no memory for the part.
        """
        start = None if self.draining else self.free.take(size)
        if start is not None and back:
            try:
                self.slab.back(start, start + size)
            except OSError:
                self.free.give(start, size)
                raise
        return start


class Copying:
    """A copy of buffers into shared memory that is made piece by piece. Made by `Pool.begin`.

    The memory is returned where the object is deleted before its end.
    """

    __slots__ = ("_refuse", "_rest", "failed", "views")

    def __init__(
        self,
        views: list[memoryview],
        buffers: Sequence[Bytes],
        refuse: Callable[[OSError], None],
    ) -> None:
        self.views = views
        """the copies, complete once ``done``"""
        self.failed = False
        """whether the system has no memory for the copies"""
        self._rest: deque[tuple[memoryview, memoryview]] = deque(
            (view, memoryview(buffer)) for view, buffer in zip(views, buffers, strict=True)
        )
        self._refuse = refuse

    @property
    def done(self) -> bool:
        """Whether all is copied, or the copy has failed."""
        return not self._rest

    def copy_some(self, limit: int = PIECE_BYTES) -> int:
        """Copy at most ``limit`` bytes; returns the number of copied bytes."""
        copied = 0
        while self._rest and copied < limit:
            try:
                copied += self._copy(limit - copied)
            except OSError as error:
                self.failed = True
                self._rest.clear()
                self._refuse(error)
        return copied

    def _copy(self, limit: int) -> int:
        """Copy from the first buffer that is not complete.

        Raises:
            OSError: the system has no memory for the copy.
        """
        view, rest = self._rest[0]
        count, done = min(limit, len(rest)), len(view) - len(rest)
        if (place := view_of(view)) is not None:
            start = place.offset + done
            place.loan.slab.back(start, start + count)
        view[done : done + count] = rest[:count]
        if count < len(rest):
            self._rest[0] = view, rest[count:]
        else:
            self._rest.popleft()
        return count


class Pool:
    """Lends parts of its slabs. May be used in any thread."""

    def __init__(self, limit: int = POOL_BYTES, slab_bytes: int = SLAB_BYTES) -> None:
        self._limit = limit
        self._slab_bytes = slab_bytes
        self._slabs: list[_PooledSlab] = []
        self._returned: deque[tuple[_PooledSlab, int, int, bool]] = deque()
        self._lock = threading.Lock()
        self._warnings: set[str] = set()
        self.refused = 0
        """number of requests that did not get memory"""

    @property
    def size(self) -> int:
        """Bytes of all slabs."""
        return sum(pooled.slab.size for pooled in tuple(self._slabs))

    def lend(self, buffers: Sequence[Bytes]) -> list[memoryview] | None:
        """A copy of these buffers in shared memory; None where the pool has no free memory.

        The memory is free again when its views are deleted, in this process and in every borrower.
        """
        views = self.take([len(buffer) for buffer in buffers])
        for view, buffer in zip(views or (), buffers, strict=views is not None):
            view[:] = buffer
        return views

    def begin(self, buffers: Sequence[Bytes]) -> Copying | None:
        """Lend parts for large buffers, which the caller copies piece by piece. The buffers must
        not change until the copy is done."""
        views = self.take([len(buffer) for buffer in buffers], back=False)
        return None if views is None else Copying(views, buffers, self._refuse)

    def take(self, sizes: Sequence[int], *, back: bool = True) -> list[memoryview] | None:
        """Buffers of these sizes in one part of a slab; None where the pool has no free memory.

        The memory is free again when its views are deleted, in this process and in every borrower.

        Args:
            sizes: in bytes.
            back: allocate the memory too. Otherwise `Slab.back` must be called before a write.
        """
        offsets, size = _lay_out(sizes)
        with self._lock:
            found = self._find(-(-size // PAGE) * PAGE, back)
            if found is None:
                self.refused += 1
                return None
        pooled, start, taken = found
        loan = Loan(pooled.slab, partial(self._return, pooled, start, taken))
        return [loan.view(start + offset, one) for offset, one in zip(offsets, sizes, strict=True)]

    # ---- internals

    def _find(self, size: int, back: bool) -> tuple[_PooledSlab, int, int] | None:
        self._collect()
        try:
            if (found := self._take(size, back)) is not None:
                return found
            if self._make_room(slab_size := max(self._slab_bytes, size + PAGE)):
                self._slabs.append(_PooledSlab(make_slab(slab_size)))
                return self._take(size, back)
        except OSError as error:
            self._warn_once(_no_memory(error))
            return None
        self._warn_once(f"all {self._limit >> 20} MiB of it are in use")
        return None

    def _take(self, size: int, back: bool) -> tuple[_PooledSlab, int, int] | None:
        for pooled in self._slabs:
            if (start := pooled.take(size, back=back)) is not None:
                return pooled, start, size
        return None

    def _make_room(self, slab_size: int) -> bool:
        """Whether the limit allows one more slab of this size; removes idle slabs for it."""
        for pooled in list(self._slabs):
            if self.size + slab_size > self._limit and pooled.free.idle:
                self._slabs.remove(pooled)
        return self.size + slab_size <= self._limit

    def _refuse(self, error: OSError) -> None:
        with self._lock:
            self.refused += 1
            self._warn_once(_no_memory(error))

    def _warn_once(self, why: str) -> None:
        if why not in self._warnings:
            self._warnings.add(why)
            log.warning("large arrays go through the socket, not shared memory: %s", why)

    def _return(self, pooled: _PooledSlab, start: int, size: int, poisoned: bool) -> None:
        # Runs in any thread, at any point of what the thread is doing: so it takes no lock.
        self._returned.append((pooled, start, size, poisoned))

    def _collect(self) -> None:
        """Free the returned parts."""
        while self._returned:
            pooled, start, size, poisoned = self._returned.popleft()
            pooled.free.give(start, size)
            pooled.draining |= poisoned
            if pooled.draining and pooled.free.idle and pooled in self._slabs:
                self._slabs.remove(pooled)


def _no_memory(error: OSError) -> str:
    return f"the system gives no more ({error.strerror})"


def _lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The offset of each buffer, and the bytes of all buffers together."""
    offsets, stop = [], 0
    for size in sizes:
        offsets.append(stop)
        stop += -(-size // ALIGN) * ALIGN
    return offsets, stop


def process_pool() -> Pool:
    """The pool of this process. A forked process has another pool: two must not lend the same."""
    return _pool_of(os.getpid())


@cache
def _pool_of(pid: int) -> Pool:
    return Pool()


async def copy_in_turns(buffers: Sequence[Bytes]) -> list[memoryview | bytearray]:
    """A copy of these buffers, in shared memory if the pool has free memory.

    Other tasks of this loop run after each `PIECE_BYTES`. The buffers must not change meanwhile.
    """
    copying = process_pool().begin(buffers)
    while copying is not None and not copying.done:
        copying.copy_some(PIECE_BYTES)
        await asyncio.sleep(0)
    if copying is not None and not copying.failed:
        return [*copying.views]
    return [*await copy_buffers(buffers)]
