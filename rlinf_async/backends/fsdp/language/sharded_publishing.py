"""Published weights of a sharded model: each rank writes its rows into the memory of rank 0."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from rlinf_async.backends.fsdp.language.publishing import policy_weights
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.sharding import first_row, local_shard
from rlinf_async.backends.language_training.publishing_in_place import Part, publish_in_place
from rlinf_async.backends.transformers.tensors import Slice
from rlinf_async.messages.weights import Allocate, WeightUpdate


def publish_shards(
    manager: FSDPModelManager,
    dtype: torch.dtype,
    version: int,
    bucket_bytes: int,
    *,
    allocate: Allocate | None,
    previous: WeightUpdate | None,
) -> WeightUpdate | None:
    """Return what `publish_in_place` does, None also for one rank and for FSDP1. Collective over
    the active ranks."""
    if manager.world_size == 1 or isinstance(manager.model, FullyShardedDataParallel):
        return None
    weights = policy_weights(manager)
    if not _by_rows(weights.memory.values()):
        return None
    tensors, parts = {}, {}
    for name, one in weights.slices.items():
        live = weights.memory[one.tensor]
        kind = dtype if live.is_floating_point() else live.dtype
        tensors[name] = torch.empty(one.shape, dtype=kind, device="meta")
        parts[name] = _rows(live, one, manager.rank)
    return publish_in_place(
        manager, tensors, parts, version, bucket_bytes, allocate=allocate, previous=previous
    )


def _by_rows(tensors: Iterable[Tensor]) -> bool:
    sharded = [one for one in tensors if isinstance(one, DTensor)]
    return all(one.device_mesh.ndim == 1 and one.placements == (Shard(0),) for one in sharded)


def _rows(live: Tensor, wanted: Slice, rank: int) -> list[Part]:
    """Return the elements of a slice that this rank writes: at most one range."""
    local = local_shard(live).detach()
    first = 0
    if isinstance(live, DTensor):
        first = first_row(live) * math.prod(live.shape[1:])
    elif rank:
        return []  # the same on all ranks: rank 0 writes it
    start = max(wanted.offset, first)
    end = min(wanted.offset + wanted.elements, first + local.numel())
    if start >= end:
        return []
    own = local.reshape(-1)[start - first : end - first]
    return [Part(own, (end - start,), (1,), start - wanted.offset)]
