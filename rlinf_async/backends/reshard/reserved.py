"""Memory for shards, with a place for every element of a model's tensors.

::

    address space of one tensor    |........|########|########|........|........|
    held by 2 ranks, this one               |<---- old shard ->|
    held by 4 ranks, this one               |<- new ->|                      nothing moves

Address space costs nothing until it is written to, so a rank reserves that of whole tensors. A
shard lies where its elements are in the tensor, whatever the number of ranks: what a rank keeps in
a rescale it neither copies nor has twice.

Invariant: no tensor but ``held`` refers to memory that is given out.

Memory that no tensor refers to any more is marked free (``MADV_FREE``): the system takes it when it
needs some. Until then a rescale back finds it: fresh memory costs a system many times what filling
it does, a virtual machine above all.

Large pages: the kernel clears a page at its first touch, which is most of what filling new memory
costs. Pages of 2 MiB, where asked for, take half the time of those of 4 KiB. Neighbouring mappings
that ask for the same become one to the kernel, so that a large page may span two buffers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

MAPPED_BYTES = 1 << 20
"""size from which a buffer is a mapping of its own; smaller ones come from torch's allocator"""
LARGE_PAGE = 1 << 21
"""bytes"""
WORTH_LARGE_PAGES = 2 * LARGE_PAGE
"""bytes; each range with large pages of its own is an entry in the system's table of them"""
NO_RESERVE = 0x4000
"""of Linux: address space, of which only a part will be used; Python 3.11 has no name for it"""

MARK_FREE: int | None = mmap.MADV_FREE if sys.platform == "linux" else None
"""how free memory is marked; None where the system cannot, and shards then have no place"""

_lock = threading.RLock()
"""Of all tensors, and reentrant: shards are freed in any thread, also by a garbage collection while
the lock is held."""


def _renew_lock() -> None:
    """Replace the lock in a forked process, where its holder does not exist."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def untouched(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new, uninitialised buffer; a large one has large pages, none of them touched yet."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if device.type != "cpu" or size < MAPPED_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=dtype).view(tuple(shape))


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new buffer of zeros; the pages of a large one on the CPU are touched by whoever uses
    them first, as the system clears them then."""
    made = untouched(shape, dtype, device)
    is_mapped = device.type == "cpu" and made.nbytes >= MAPPED_BYTES
    return made if is_mapped and hasattr(mmap, "MADV_HUGEPAGE") else made.zero_()


class Reservations:
    """Reserved address space of the tensors of one rank, by kind (weights, a moment) and name.

    Only on the CPU, and only of large ones: other shards come from torch's allocator.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str], _Reserved] = {}

    def room(
        self,
        kind: str,
        name: str,
        whole: Sequence[int],
        first: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        held: Tensor | None = None,
    ) -> Tensor:
        """Return memory for the elements of the tensor ``whole`` from ``first`` on, row-major.

        What it shares with ``held``, this rank's present shard, keeps its content; the rest is
        uninitialised. It lies elsewhere where a tensor still refers to the memory in its place.
        """
        size = math.prod(whole) * dtype.itemsize
        low = first * dtype.itemsize
        high = low + math.prod(shape) * dtype.itemsize
        if size >= MAPPED_BYTES and high > low and MARK_FREE is not None:
            reserved = self._tensors.get((kind, name))
            if reserved is None or reserved.size != size:
                reserved = self._tensors[kind, name] = _Reserved(size)
            given = reserved.take(low, high, dtype, held)
            if given is not None:
                return torch.frombuffer(given, dtype=dtype).view(tuple(shape))
        return untouched(shape, dtype, torch.device("cpu"))

    def give_back(self) -> None:
        """Free all of it, as soon as no tensor refers to it; later shards have other places."""
        self._tensors.clear()


class _Reserved:
    """The address space of one tensor. May be used, and freed, from any thread."""

    def __init__(self, size: int) -> None:
        """Reserve ``size`` bytes; `take` returns None where there is no address space left."""
        self.size = size
        self._taken: dict[int, tuple[int, int]] = {}
        """ranges of bytes ``[low, high)`` that tensors refer to"""
        self._tickets = itertools.count()
        try:
            self._memory: mmap.mmap | None = _address_space(size + LARGE_PAGE)
        except OSError:
            self._memory = None
            return
        begin = int(np.frombuffer(self._memory, np.uint8).__array_interface__["data"][0])
        self._base = -begin % LARGE_PAGE
        # Where the system makes all pages large by default, it would also do so at a shard's edges.
        _advise(self._memory, mmap.MADV_NOHUGEPAGE, 0, len(self._memory))
        self._address = begin + self._base

    def take(
        self, low: int, high: int, dtype: torch.dtype, held: Tensor | None
    ) -> memoryview | None:
        """Return these bytes, or None where a tensor refers to them."""
        if self._memory is None:
            return None
        kept = None
        if held is not None and held.dtype == dtype:
            start = held.data_ptr() - self._address
            kept = (start, start + held.nbytes)
        with _lock:
            # A copy: a garbage collection in here may end shards of the same tensor.
            taken = list(self._taken.values())
            if any(a < high and low < b and (a, b) != kept for a, b in taken):
                return None
            ticket = next(self._tickets)
            self._taken[ticket] = low, high
            self._ask_for_large_pages(low, high)
            given = memoryview(self._memory)[self._base + low : self._base + high]
        weakref.finalize(given, self._free, ticket).atexit = False
        return given

    def _ask_for_large_pages(self, low: int, high: int) -> None:
        """Inside only: a large page at an edge would take memory that the shard does not need."""
        assert self._memory is not None
        begin = -(-low // LARGE_PAGE) * LARGE_PAGE
        length = high // LARGE_PAGE * LARGE_PAGE - begin
        if length >= WORTH_LARGE_PAGES:
            _advise(self._memory, mmap.MADV_HUGEPAGE, self._base + begin, length)

    def _free(self, ticket: int) -> None:
        assert self._memory is not None
        assert MARK_FREE is not None
        with _lock:
            low, high = self._taken.pop(ticket)
            for a, b in _without(low, high, list(self._taken.values())):
                begin = -(-a // mmap.PAGESIZE) * mmap.PAGESIZE
                length = b // mmap.PAGESIZE * mmap.PAGESIZE - begin
                if length > 0:
                    _advise(self._memory, MARK_FREE, self._base + begin, length)


def _address_space(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)


def _advise(memory: mmap.mmap, advice: int, begin: int, length: int) -> None:
    with contextlib.suppress(OSError):  # a kernel without this advice: nothing depends on it
        memory.madvise(advice, begin, length)


def _without(low: int, high: int, others: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what is left of a range without the others."""
    left: list[tuple[int, int]] = []
    for a, b in sorted(others):
        if a > low and low < high:
            left.append((low, min(a, high)))
        low = max(low, b)
    if low < high:
        left.append((low, high))
    return left
