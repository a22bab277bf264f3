"""Freeing the memory of a model and its optimizer at once, and cheaply.

A sharded model and the hooks of FSDP2 are in reference cycles, an optimizer and its schedule too:
reference counts never reach zero, and a full garbage collection visits every object of the process,
which takes longer than moving some hundred megabytes. So the cycles are broken by hand.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.multiprocessing.reductions import StorageWeakRef

from rlinf_async.backends.fsdp.sharding import local_shard

HOLDERS = (FSDPState, FSDPParamGroup, FSDPParam)


class Storages:
    """Weak references to the storages of some tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages: list[StorageWeakRef] = [
            StorageWeakRef(local_shard(one).untyped_storage())  # type: ignore[no-untyped-call]
            for one in tensors
        ]

    @property
    def freed(self) -> bool:
        """Whether all of them are freed."""
        return all(one.expired() for one in self._storages)  # type: ignore[no-untyped-call]


def storages_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Storages:
    """Return the storages of a model and its optimizer; tensors on the meta device have none."""
    return Storages(one for one in _tensors(model, optimizer) if not one.is_meta)


def break_cycles(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make a model and its optimizer useless, so that no reference cycle holds their memory."""
    optimizer.state.clear()
    optimizer.param_groups.clear()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _empty(module._get_fsdp_state())


def collect_unless_freed(storages: Storages) -> None:
    """Run a full garbage collection if storages that should be freed are still referred to.

    That is by a cycle that `break_cycles` does not know, or by the caller of a rescale.
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


def _empty(thing: Any) -> None:
    if isinstance(thing, list):
        for one in thing:
            _empty(one)
    elif isinstance(thing, HOLDERS):
        held = list(vars(thing).values())
        vars(thing).clear()
        _empty(held)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for state in optimizer.state.values():
        yield from (one for one in state.values() if isinstance(one, Tensor))
