"""Sharding a model over the ranks, and the part of a tensor that one rank holds.

At world size 1 the model stays a plain module: there is nothing to shard, and the hooks of FSDP
cost more than the arithmetic of a small policy.
"""

from __future__ import annotations

import gc
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

Shards = dict[str, Tensor]
"""what one rank holds of some tensors, by their names"""


def shard(
    model: nn.Module,
    strategy: Literal["fsdp1", "fsdp2"],
    world_size: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Return the model, sharded over the ``world_size`` ranks of a group (torch's default one).

    Every block of a transformer (the longest ModuleList) is a unit of its own, so that no more than
    two blocks are unsharded at a time.
    """
    if world_size == 1:
        return model
    if group is None:
        mesh = init_device_mesh(device.type, (world_size,))
    else:
        mesh = DeviceMesh.from_group(group, device.type)
    if strategy == "fsdp1":
        return FullyShardedDataParallel(
            model, use_orig_params=True, device_mesh=mesh, device_id=device
        )
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gc.collect(1)  # a function of torch's that refers to itself, and holds the model until then
    return model


def reshard(model: nn.Module) -> None:
    """Shard parameters again that a forward pass without a backward one left unsharded.

    FSDP keeps those of the outermost module for the backward pass; weights that change before the
    next forward pass would then be ignored by it.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            module._handle.reshard(free_unsharded_flat_param=True)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that was sharded: FSDP1 wraps it, FSDP2 makes it a subclass of itself."""
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def local_shard(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: DTensor) -> int:
    """Return the first global row of this rank's shard (rows are dealt as by ``torch.chunk``)."""
    mesh = tensor.device_mesh
    chunk = -(-tensor.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * chunk, tensor.shape[0])


def sharded_like(target: Tensor, local: Tensor) -> Any:
    """Return a shard as what the target is: a parameter or a tensor, sharded in the same way."""
    made = local
    if isinstance(target, DTensor):
        made = DTensor.from_local(
            local,
            target.device_mesh,
            target.placements,
            run_check=False,
            shape=target.shape,
            stride=target.stride(),
        )
    if isinstance(target, nn.Parameter):
        return nn.Parameter(made, requires_grad=target.requires_grad)
    return made


def _blocks(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
