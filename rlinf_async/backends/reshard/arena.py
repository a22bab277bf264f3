"""Memory for what strategies replace by one another: what was touched once is used again.

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

import torch
from torch import Tensor

from rlinf_async.backends.reshard import address_space
from rlinf_async.backends.reshard.address_space import AddressSpace, locked, without


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
