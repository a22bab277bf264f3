"""Address space that a process reserves, and the parts of it that tensors refer to.

Address space costs nothing until it is written to. Memory that no tensor refers to any more is
marked free (``MADV_FREE``): the system takes it when it needs some. Until then whoever gets the
same place finds it there: fresh memory costs a system many times what filling it does, a virtual
machine above all.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterable

import numpy as np

MAPPED_BYTES = 1 << 20
"""size from which a tensor has address space of its own; smaller ones come from torch's
allocator"""
LARGE_PAGE = 1 << 21
"""bytes"""
NO_RESERVE = 0x4000
"""of Linux: address space, of which only a part will be used; Python 3.11 has no name for it"""
MARK_FREE: int | None = mmap.MADV_FREE if sys.platform == "linux" else None
"""how free memory is marked; None where the system cannot, and no address space is reserved then"""

_lock = threading.RLock()
"""Of all tensors, and reentrant: they are freed in any thread, also by a garbage collection while
the lock is held."""


def _renew_lock() -> None:
    """Replace the lock in a forked process, where its holder does not exist."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def locked() -> contextlib.AbstractContextManager[object]:
    """The lock to hold from `AddressSpace.taken` until `AddressSpace.give`."""
    return _lock


class AddressSpace:
    """So many bytes of address space, from a multiple of `LARGE_PAGE` on, in small pages. May be
    used, and freed, from any thread.

    Raises `OSError` where the system has none left, or cannot mark memory free.
    """

    def __init__(self, size: int) -> None:
        if MARK_FREE is None:
            raise OSError("the system cannot mark memory free")
        self._taken: dict[int, tuple[int, int]] = {}
        self._tickets = itertools.count()
        self._memory = _address_space(size + LARGE_PAGE)
        begin = int(np.frombuffer(self._memory, np.uint8).__array_interface__["data"][0])
        self._base = -begin % LARGE_PAGE
        self.address = begin + self._base
        # Where the system makes all pages large by default, it would also do so at a tensor's ends.
        self.advise(mmap.MADV_NOHUGEPAGE, 0, size)

    @property
    def taken(self) -> list[tuple[int, int]]:
        """The ranges of bytes ``[low, high)`` that tensors refer to. A copy: a garbage collection
        may end tensors at any time."""
        return list(self._taken.values())

    def give(self, low: int, high: int) -> memoryview:
        """Return these bytes, uninitialised; they are taken as long as anything refers to them."""
        with _lock:
            ticket = next(self._tickets)
            self._taken[ticket] = low, high
            given = memoryview(self._memory)[self._base + low : self._base + high]
        weakref.finalize(given, self._free, ticket).atexit = False
        return given

    def advise(self, advice: int, low: int, high: int) -> None:
        """Tell the system how this range, of whole pages, will be used."""
        with contextlib.suppress(OSError):  # a kernel without this advice: nothing depends on it
            self._memory.madvise(advice, self._base + low, high - low)

    def _free(self, ticket: int) -> None:
        assert MARK_FREE is not None
        with _lock:
            low, high = self._taken.pop(ticket)
            for a, b in without(low, high, self.taken):
                begin = -(-a // mmap.PAGESIZE) * mmap.PAGESIZE
                end = b // mmap.PAGESIZE * mmap.PAGESIZE
                if end > begin:
                    self.advise(MARK_FREE, begin, end)


def without(low: int, high: int, others: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what is left of a range without the others."""
    left: list[tuple[int, int]] = []
    for a, b in sorted(others):
        if a > low and low < high:
            left.append((low, min(a, high)))
        low = max(low, b)
    if low < high:
        left.append((low, high))
    return left


def _address_space(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
