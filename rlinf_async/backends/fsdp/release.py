"""Freeing the memory of a model and its optimizer at once, and cheaply.

A sharded model and the hooks of FSDP2 are in reference cycles, an optimizer and its schedule too:
reference counts never reach zero, and a full garbage collection visits every object of the process,
which takes longer than moving some hundred megabytes. So the cycles are broken by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from rlinf_async.backends.fsdp.sharding import local_shard
from rlinf_async.backends.rescale.release import Storages

HOLDERS = (FSDPState, FSDPParamGroup, FSDPParam)


def storages_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Storages:
    """Return the storages of a model and its optimizer; tensors on the meta device have none."""
    tensors = (one for one in _tensors(model, optimizer) if not one.is_meta)
    return Storages(local_shard(one) for one in tensors)


def break_cycles(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make a model and its optimizer useless, so that no reference cycle holds their memory."""
    optimizer.state.clear()
    optimizer.param_groups.clear()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _empty(module._get_fsdp_state())


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
