"""Whether the memory of an old model is freed, and what is done where it is not."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Storages:
    """Weak references to the storages of some tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages: list[StorageWeakRef] = [
            StorageWeakRef(one.untyped_storage())  # type: ignore[no-untyped-call]
            for one in tensors
        ]

    @property
    def freed(self) -> bool:
        """Whether all of them are freed."""
        return all(one.expired() for one in self._storages)  # type: ignore[no-untyped-call]


def collect_unless_freed(storages: Storages) -> None:
    """Run a full garbage collection if storages that should be freed are still referred to.

    That is by a cycle that the backend did not break, or by the caller of a rescale.
    """
    if not storages.freed:
        gc.collect()


def trim_heap() -> None:
    """Return freed memory to the system, where the C library can.

    glibc keeps freed blocks of up to some tens of megabytes, such as an optimizer's moments, for
    later allocations; new shards are mapped, and do not come from there.
    """
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _c_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # no such library on this platform
        return None
