"""Giving a model's memory back at once, and cheaply.

A sharded model and the hooks of FSDP2 refer to each other in circles, an optimizer and its schedule
too: reference counts never reach zero, and a full garbage collection looks at every object of the
process, which takes longer than moving some hundred megabytes. So the circles are cut by hand.
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


class Memory:
    """The storages of some tensors, which are not held."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages: list[StorageWeakRef] = [
            StorageWeakRef(local_shard(one).untyped_storage())  # type: ignore[no-untyped-call]
            for one in tensors
        ]

    @property
    def is_back(self) -> bool:
        """Nobody holds any of it any more."""
        return all(one.expired() for one in self._storages)  # type: ignore[no-untyped-call]


def memory_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Memory:
    """Look at the memory of a model and its optimizer; what is on torch's meta device has none."""
    return Memory(one for one in _tensors(model, optimizer) if not one.is_meta)


def take_apart(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make a model and its optimizer useless, so that they hold no memory in circles."""
    optimizer.state.clear()
    optimizer.param_groups.clear()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _empty(module._get_fsdp_state())


def collect_unless_back(memory: Memory) -> None:
    """Run a full garbage collection if memory that was to be given back is still held.

    By circles that this page does not know, or by somebody who looks at it.
    """
    if not memory.is_back:
        gc.collect()


def return_to_system() -> None:
    """Let the system have what this process has freed, where the C library can be told so.

    glibc keeps freed blocks of up to some tens of megabytes, such as an optimizer's moments, for
    its next ones; the new shards are mapped, and do not come from there.
    """
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _c_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # none of that kind here
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
