"""Memory for shards, with a place for every element of a model's tensors.

::

    address space of one tensor    |........|########|########|........|........|
    held by 2 ranks, this one               |<---- old shard ->|
    held by 4 ranks, this one               |<- new ->|                      nothing moves

A rank reserves the address space of whole tensors. A shard lies where its elements are in the
tensor, whatever the number of ranks: what a rank keeps in a rescale it neither copies nor has
twice.

Invariant: no tensor but ``held`` refers to memory that is given out.

Large pages: the kernel clears a page at its first touch, which is most of what filling new memory
costs. Pages of 2 MiB, where asked for, take half the time of those of 4 KiB. Neighbouring mappings
that ask for the same become one to the kernel, so that a large page may span two buffers.

Memory for what strategies replace by one another: what was touched once is used again.

::

    address space      |old weights|old moments|.........................................
    during a change    |old weights|old moments|new weights|new moments|.................
    after it           |free, was touched      |new weights|new moments|.................
    in the next one    |newer weights|newer mo-|new weights|new moments|ments|...........

A tensor lies in the lowest gap that has room for it, so memory of earlier strategies comes first.
That is small pages: large ones are no faster to touch again, and several times slower the first
time on a virtual machine whose host has to find them.

Invariant: no two tensors that anything refers to overlap.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlinf_async.backends.reshard import address_space
from rlinf_async.backends.reshard.address_space import LARGE_PAGE, AddressSpace, locked, without

WORTH_LARGE_PAGES = 2 * LARGE_PAGE
"""bytes; each range with large pages of its own is an entry in the system's table of them"""


class Empty(Protocol):
    """Returns an uninitialised tensor."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return it."""
        ...


def untouched(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new, uninitialised buffer; a large one has large pages, none of them touched yet."""
    size = torch.Size(shape).numel() * dtype.itemsize
    is_small = size < address_space.MAPPED_BYTES
    if device.type != "cpu" or is_small or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=dtype).view(tuple(shape))


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new buffer of zeros; the pages of a large one on the CPU are touched by whoever uses
    them first, as the system clears them then."""
    made = untouched(shape, dtype, device)
    is_mapped = device.type == "cpu" and made.nbytes >= address_space.MAPPED_BYTES
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
        if size >= address_space.MAPPED_BYTES and high > low:
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
    """The address space of one tensor."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._space: AddressSpace | None = None
        with contextlib.suppress(OSError):
            self._space = AddressSpace(size)

    def take(
        self, low: int, high: int, dtype: torch.dtype, held: Tensor | None
    ) -> memoryview | None:
        """Return these bytes, or None where a tensor refers to them, or nothing is reserved."""
        space = self._space
        if space is None:
            return None
        kept = None
        if held is not None and held.dtype == dtype:
            start = held.data_ptr() - space.address
            kept = (start, start + held.nbytes)
        with locked():
            if any(a < high and low < b and (a, b) != kept for a, b in space.taken):
                return None
            given = space.give(low, high)
        # Inside only: a large page at an end would take memory that the shard does not need.
        begin, end = -(-low // LARGE_PAGE) * LARGE_PAGE, high // LARGE_PAGE * LARGE_PAGE
        if end - begin >= WORTH_LARGE_PAGES:
            space.advise(mmap.MADV_HUGEPAGE, begin, end)
        return given


class Arena:
    """The memory of one rank on the CPU; small tensors, and those of devices, come from torch.

    Args:
        size: bytes of address space; four times the machine's memory by default.
    """

    def __init__(self, size: int | None = None) -> None:
        self._size = size or 4 * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        self._space: AddressSpace | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor, whose memory is the arena's again with the last view."""
        size = math.prod(shape) * dtype.itemsize
        given = None
        if device.type == "cpu" and size >= address_space.MAPPED_BYTES:
            given = self._take(size)
        if given is None:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        count = math.prod(shape)
        return torch.frombuffer(given, dtype=dtype, count=count).view(tuple(shape))

    def give_back(self) -> None:
        """Free all of it, as soon as no tensor refers to it; later tensors lie elsewhere."""
        self._space = None

    def _take(self, size: int) -> memoryview | None:
        """Return so many bytes, from a page's begin on; None where there is no room."""
        if self._space is None:
            with contextlib.suppress(OSError):
                self._space = AddressSpace(self._size)
        space = self._space
        if space is None:
            return None
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with locked():
            gaps = without(0, self._size, space.taken)
            low = next((low for low, high in gaps if high - low >= room), None)
            return space.give(low, low + room) if low is not None else None
