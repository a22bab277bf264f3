"""Sharding a model over the ranks, and synchronising its gradients only when needed.

At world size 1 the model stays a plain module: there is nothing to shard, and the hooks of FSDP
cost more than the arithmetic of a small policy.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor


def shard(
    model: nn.Module,
    strategy: Literal["fsdp1", "fsdp2"],
    world_size: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Return the model, sharded over the ``world_size`` ranks of a group (torch's default one).

    Every block of a transformer (the longest ModuleList) is a unit of its own, so that no more than
    two blocks are whole at a time.
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


@contextlib.contextmanager
def gradient_sync(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Reduce gradients over the ranks after the backward passes inside, or only add them up."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        yield
    elif isinstance(model, FullyShardedDataParallel) and not enabled:
        with model.no_sync():
            yield
    else:
        yield


def clip_gradients(model: nn.Module, max_norm: float | None) -> float:
    """Clip the gradients of a sharded model to the global norm; return the norm before."""
    limit = float("inf") if max_norm is None else max_norm
    if isinstance(model, FullyShardedDataParallel):
        return float(model.clip_grad_norm_(limit))
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def local_shard(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _blocks(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
