"""Whether pages that are copied on write were written. Linux 6.7 or later can tell without effort.

It pays to know: to forget a part whose pages are as the other process left them would only cost
what it takes to find each of them again.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from functools import cache
from typing import Final

_ARGUMENTS: Final = struct.Struct("<12Q")
_SCAN: Final = 3 << 30 | _ARGUMENTS.size << 16 | ord("f") << 8 | 16
"""PAGEMAP_SCAN of linux/fs.h"""
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4


def was_written(address: int, size: int) -> bool:
    """Whether a page here is a copy of this process's own; True also where this cannot be told."""
    pagemap = _pagemap(os.getpid())
    if pagemap < 0:
        return True
    region = (ctypes.c_uint64 * 3)()
    request = _ARGUMENTS.pack(
        _ARGUMENTS.size, 0, address, address + size, 0, ctypes.addressof(region), 1, 1,
        _FILE, _FILE, _PRESENT | _SWAPPED, _FILE | _PRESENT,
    )  # fmt: skip
    try:
        regions: int = fcntl.ioctl(pagemap, _SCAN, bytearray(request))
    except OSError:
        return True
    return regions > 0


@cache
def _pagemap(pid: int) -> int:
    """The file that tells it, for this process; -1 where there is none."""
    try:
        return os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
