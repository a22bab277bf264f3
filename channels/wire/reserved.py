"""Memory for a large array before its bytes have arrived.

Addresses are reserved at once, so that the array is filled in place, piece by piece, and never
copied or moved. The system gives memory for them as they are written, in large pages where it has
some: that takes a quarter of the time of a `bytearray` that grows. So a peer that announces much
and sends little makes this process hold little.
"""

from __future__ import annotations

import mmap
from typing import Final

MAPPED_BYTES: Final = 32 * 1024**2
"""Smaller arrays lie in the heap, whose pages are used again and again."""
_FLAGS: Final = (
    mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    if hasattr(mmap, "MAP_ANONYMOUS")
    else 0
)


def reserve(size: int) -> memoryview | bytearray:
    """A buffer of ``size`` bytes to be filled from its beginning; an empty `bytearray`, which grows
    as it is filled, where the system does not give addresses without memory behind them."""
    if not _FLAGS:
        return bytearray()
    try:
        memory = mmap.mmap(-1, size, flags=_FLAGS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError, OverflowError):
        return bytearray()
    return memoryview(memory)


def is_reserved(buffer: object) -> bool:
    """Whether a buffer is what `reserve` gave: nobody else has it."""
    return isinstance(buffer, memoryview) and isinstance(buffer.obj, mmap.mmap)
