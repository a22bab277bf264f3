"""Memory for new shards, on large pages: their first touch is most of what filling them costs.

The kernel hands memory out in pages that it clears at the first touch: of 4 KiB, or, where asked,
of 2 MiB, which takes half the time. Large buffers are mappings of their own. Neighbours that ask
for the same become one to the kernel, so that a large page may lie across two buffers; and what a
buffer took goes back as soon as nobody looks at it, not when the allocator feels like it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

WORTH_IT = 1 << 20
"""bytes; a smaller buffer comes from torch's allocator"""


def untouched(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new buffer that holds anything; nothing was written to it where it is large."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if device.type != "cpu" or size < WORTH_IT or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=dtype).view(tuple(shape))
