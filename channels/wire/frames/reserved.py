"""Memory for a large array before its bytes have arrived.

Addresses are reserved at once, so that the array is filled in place, piece by piece, and never
copied or moved, as a `bytearray` that grows may be. The system gives memory for them as they are
written: a peer that announces much and sends little makes this process hold little.

Large pages are not asked for. Where memory is warm they take a quarter of the time; in a virtual
machine whose free memory went back to its host they took five times as long.
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
        return memoryview(mmap.mmap(-1, size, flags=_FLAGS))
    except (OSError, ValueError, OverflowError):
        return bytearray()


def is_reserved(buffer: object) -> bool:
    """Whether a buffer is what `reserve` gave: nobody else has it."""
    return isinstance(buffer, memoryview) and isinstance(buffer.obj, mmap.mmap)
