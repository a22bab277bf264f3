"""Memory for shards on the CPU, with a place for every element of a model's tensors.

::

    address space of one tensor    |........|########|########|........|........|
    held by 2 ranks, this one               |<---- old shard ->|
    held by 4 ranks, this one               |<- new ->|                      nothing moves

A rank reserves the address space of whole tensors, which costs nothing until it is written to. A
shard lies where its elements are in the tensor, whatever the number of ranks: what a rank keeps in
a rescale it neither copies nor has twice. Rows that it gives up are marked free: the system takes
them when it needs memory, and until then a change back finds them there. Fresh memory costs a
system many times what filling it does, a virtual machine above all.

Invariant: no tensor but ``held`` refers to memory that is given out.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

MAPPED_BYTES = 1 << 20
"""size from which a tensor has address space of its own; smaller ones come from torch's
allocator"""
LARGE_PAGE = 1 << 21
"""bytes; the first touch of a large page takes half the time of that of as many small ones"""
WORTH_LARGE_PAGES = 2 * LARGE_PAGE
"""least bytes that get large pages of their own: each such range is an entry in the system's table
"""
NO_RESERVE = 0x4000
"""Linux's ``MAP_NORESERVE``, for address space of which only a part will be used; Python 3.11 has
no name for it"""
MARK_FREE: int | None = mmap.MADV_FREE if sys.platform == "linux" else None
"""how free memory is marked; None where the system cannot, and no address space is reserved then"""


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new buffer of zeros; the pages of a large one on the CPU are touched by whoever uses
    them first, as the system clears them then."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < MAPPED_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


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
        given: memoryview | None = None
        if MARK_FREE is not None and size >= MAPPED_BYTES and high > low:
            reserved = self._tensors.get((kind, name))
            with contextlib.suppress(OSError):  # no address space is left
                if reserved is None or reserved.size != size:
                    reserved = self._tensors[kind, name] = _Reserved(size)
                given = reserved.take(
                    low, high, held if held is not None and held.dtype == dtype else None
                )
        if given is None:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(given, dtype=dtype).view(tuple(shape))

    def mark_free(self) -> None:
        """Let the system take what no tensor refers to any more; it stays reserved."""
        for one in self._tensors.values():
            one.mark_free()

    def give_back(self) -> None:
        """Free all of it, as soon as no tensor refers to it; later shards have other places."""
        self._tensors.clear()


class _Reserved:
    """The address space of one tensor, and the parts of it that tensors refer to."""

    def __init__(self, size: int) -> None:
        self.size = size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        self._memory = mmap.mmap(-1, size, flags=flags)
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._given: list[tuple[int, int, weakref.ref[memoryview]]] = []
        # Where the system makes all pages large by default, it would also do so at a shard's ends.
        self._advise(mmap.MADV_NOHUGEPAGE, 0, size, mmap.PAGESIZE)

    def take(self, low: int, high: int, held: Tensor | None) -> memoryview | None:
        """Return the bytes from ``low`` to ``high``, or None where a tensor other than ``held``
        refers to some of them."""
        kept = None
        if held is not None:
            start = held.data_ptr() - self._address
            kept = (start, start + held.nbytes)
        if any(a < high and low < b and (a, b) != kept for a, b in self._taken()):
            return None
        given = memoryview(self._memory)[low:high]
        self._given.append((low, high, weakref.ref(given)))
        if high - low >= WORTH_LARGE_PAGES:
            # Inside only: a large page at an end would take memory that the shard does not need.
            self._advise(mmap.MADV_HUGEPAGE, low, high, LARGE_PAGE)
        return given

    def mark_free(self) -> None:
        """Let the system take what no tensor refers to."""
        assert MARK_FREE is not None
        low = 0
        for start, stop in sorted([*self._taken(), (self.size, self.size)]):
            self._advise(MARK_FREE, low, start, mmap.PAGESIZE)
            low = max(low, stop)

    def _taken(self) -> Iterable[tuple[int, int]]:
        """Return the ranges of bytes that tensors refer to: each tensor keeps its memory view
        alive."""
        self._given = [one for one in self._given if one[2]() is not None]
        return [(low, high) for low, high, _ in self._given]

    def _advise(self, advice: int, low: int, high: int, page: int) -> None:
        """Tell the system how the whole pages of this size in a range will be used."""
        begin = -(-(self._address + low) // page) * page - self._address
        end = (self._address + high) // page * page - self._address
        if end > begin:
            with contextlib.suppress(OSError):  # a kernel may not know it; nothing depends on it
                self._memory.madvise(advice, begin, end - begin)
