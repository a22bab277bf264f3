"""Large pages for new shards: their first touch is most of what filling them costs.

The kernel hands memory out in pages that it clears at the first touch: of 4 KiB, or, where asked,
of 2 MiB, which takes half the time. It is only advice: what does not heed it works as before.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

from torch import Tensor

WORTH_IT = 4 << 20
"""bytes; a smaller buffer has hardly a large page in it"""


def on_large_pages(buffer: Tensor) -> Tensor:
    """Ask for large pages under a CPU buffer that nobody has touched yet; return the buffer."""
    size = buffer.numel() * buffer.element_size()
    advise = _madvise()
    if advise is None or buffer.device.type != "cpu" or size < WORTH_IT:
        return buffer
    first = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (buffer.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
    advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)
    return buffer


@cache
def _madvise() -> Any:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)
