"""A place for every element of a model's tensors, of which a rank fills those that it holds.

::

    address space of one tensor    |........|########|########|........|........|
    held by 2 ranks, this one               |<---- old shard ->|
    held by 4 ranks, this one               |<- new ->|                      nothing moves

Address space costs nothing until it is written to, so a rank reserves that of whole tensors. A
shard lies where its elements are in the tensor, whatever the number of ranks: what a rank keeps in
a rescale it neither copies nor has twice.

Invariant: what is given out is looked at by nobody, but for what ``held`` has there already.

What nobody looks at any more is the system's to take (``MADV_FREE``), which it does when anybody
needs memory. Until then a rescale back finds it: to hand out fresh memory takes a system many times
what filling it does, a virtual machine's above all.
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

from rlinf_async.backends.reshard import memory

LARGE_PAGE = 1 << 21
"""bytes"""
WORTH_LARGE_PAGES = 2 * LARGE_PAGE
"""bytes; each range with large pages of its own is an entry in the system's table of them"""
NO_RESERVE = 0x4000
"""of Linux: address space, of which only a part will be used; Python 3.11 has no name for it"""

GIVEN_UP: int | None = mmap.MADV_FREE if sys.platform == "linux" else None
"""what the system is told of what nobody looks at; None where it cannot be, nor shards in place"""

_lock = threading.RLock()
"""One for all, and entered again: shards end in any thread, and amid anything (garbage collection).
"""


def _renew_lock() -> None:
    """In a forked process nobody is left who could release it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class Reservations:
    """The tensors of one rank, by what they are (weights, a moment) and name.

    Only of CPUs, and only large ones: other shards come from where tensors come from.
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

        What it shares with ``held``, the shard that this rank has now, is there; the rest holds
        anything. It lies elsewhere where somebody still looks at what is to be overwritten.
        """
        size = math.prod(whole) * dtype.itemsize
        low = first * dtype.itemsize
        high = low + math.prod(shape) * dtype.itemsize
        if size >= memory.WORTH_IT and high > low and GIVEN_UP is not None:
            reserved = self._tensors.get((kind, name))
            if reserved is None or reserved.size != size:
                reserved = self._tensors[kind, name] = _Reserved(size)
            given = reserved.take(low, high, dtype, held)
            if given is not None:
                return torch.frombuffer(given, dtype=dtype).view(tuple(shape))
        return memory.untouched(shape, dtype, torch.device("cpu"))

    def give_back(self) -> None:
        """Let the system have all of it, as soon as nobody looks at it; new places are new ones."""
        self._tensors.clear()


class _Reserved:
    """The address space of one tensor. May be used, and let go, from any thread."""

    def __init__(self, size: int) -> None:
        """Reserve ``size`` bytes. Nothing is there where the system has no address space left."""
        self.size = size
        self._taken: dict[int, tuple[int, int]] = {}
        """bytes ``[low, high)`` that somebody looks at"""
        self._tickets = itertools.count()
        try:
            self._memory: mmap.mmap | None = _address_space(size + LARGE_PAGE)
        except OSError:
            self._memory = None
            return
        begin = int(np.frombuffer(self._memory, np.uint8).__array_interface__["data"][0])
        self._base = -begin % LARGE_PAGE
        # Where the system makes all pages large by itself, those at a shard's edges too.
        _advise(self._memory, mmap.MADV_NOHUGEPAGE, 0, len(self._memory))
        self._address = begin + self._base

    def take(
        self, low: int, high: int, dtype: torch.dtype, held: Tensor | None
    ) -> memoryview | None:
        """Return these bytes, until nobody looks at them; None where they are not to be had."""
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
        weakref.finalize(given, self._let_go, ticket).atexit = False
        return given

    def _ask_for_large_pages(self, low: int, high: int) -> None:
        """Inside only: a large page at an edge would take memory that the shard does not need."""
        assert self._memory is not None
        begin = -(-low // LARGE_PAGE) * LARGE_PAGE
        length = high // LARGE_PAGE * LARGE_PAGE - begin
        if length >= WORTH_LARGE_PAGES:
            _advise(self._memory, mmap.MADV_HUGEPAGE, self._base + begin, length)

    def _let_go(self, ticket: int) -> None:
        assert self._memory is not None
        assert GIVEN_UP is not None
        with _lock:
            low, high = self._taken.pop(ticket)
            for a, b in _without(low, high, list(self._taken.values())):
                begin = -(-a // mmap.PAGESIZE) * mmap.PAGESIZE
                length = b // mmap.PAGESIZE * mmap.PAGESIZE - begin
                if length > 0:
                    _advise(self._memory, GIVEN_UP, self._base + begin, length)


def _address_space(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)


def _advise(memory: mmap.mmap, advice: int, begin: int, length: int) -> None:
    with contextlib.suppress(OSError):  # a kernel that does not know it: nothing depends on it
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
