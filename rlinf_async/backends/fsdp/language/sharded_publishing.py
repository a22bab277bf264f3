"""Published weights of a sharded model: each rank writes its rows into the memory of rank 0.

::

    rank 0   shares the last update    -> all ranks compare their rows -> changed buckets (max)
    rank 0   allocates changed buckets -> all ranks map them           -> whether all could (min)
    a rank   writes its rows           -> waits for all ranks
    rank r   hashes buckets r, r + n.. -> sum -> rank 0 builds the update

Invariant: nothing is gathered. A rank converts its own rows of one tensor at a time, and the result
is, bit for bit, the update that rank 0 would have packed of whole tensors. Every rank decides the
same, by collectives in the group of the active ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from rlinf_async.backends.fsdp import ranks
from rlinf_async.backends.fsdp.errors import FSDPError
from rlinf_async.backends.fsdp.language.publishing import Weights, policy_weights
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.sharding import first_row, local_shard
from rlinf_async.backends.transformers.tensors import Slice
from rlinf_async.messages.weights import Allocate, TensorSlot, WeightBucket, WeightUpdate
from rlinf_async.weights import pack
from rlinf_async.weights.behind import Place, map_place, places_of, this_host
from rlinf_async.weights.checksum import data_checksum, update_checksum
from rlinf_async.weights.pack import GLANCE, buckets_by_slots, elements_of, grouped, slots_of

Memory = NDArray[np.uint8]


class Rows(NamedTuple):
    """This rank's rows of one tensor, and their place in a bucket."""

    live: Tensor
    dtype: torch.dtype
    """of the published tensor"""
    start: int
    """bytes from the start of the bucket"""

    def differ(self, bucket: Tensor, limit: int | None = None) -> bool:
        """Whether the bucket has other elements there; only the first ``limit`` are compared."""
        mine = self._bytes(self.live.reshape(-1)[:limit])
        return not torch.equal(bucket[self.start : self.start + len(mine)], mine)

    def write(self, bucket: Tensor) -> None:
        """Copy the rows into the bucket."""
        mine = self._bytes(self.live)
        bucket[self.start : self.start + len(mine)].copy_(mine)

    def _bytes(self, tensor: Tensor) -> Tensor:
        return elements_of(tensor.to(self.dtype))


class Outline(NamedTuple):
    """A bucket without its bytes."""

    slots: tuple[TensorSlot, ...]
    size: int
    """bytes"""
    rows: list[Rows]
    """of this rank"""


def publish_shards(
    manager: FSDPModelManager,
    dtype: torch.dtype,
    version: int,
    bucket_bytes: int,
    *,
    allocate: Allocate | None,
    previous: WeightUpdate | None,
) -> WeightUpdate | None:
    """Return weights as `weights.pack` packs whole ones on rank 0, without buckets elsewhere.

    Only the ``allocate`` and the ``previous`` update of rank 0 are used. None, on all ranks, where
    weights have to be gathered: for one rank, FSDP1, several hosts, or memory that the ranks cannot
    map. Collective over the active ranks.

    Raises `FSDPError` where rank 0 could not allocate; that one has its own error.
    """
    if manager.world_size == 1 or isinstance(manager.model, FullyShardedDataParallel):
        return None
    weights = policy_weights(manager)
    if not _by_rows(weights.memory.values()) or not _on_one_host(manager, allocate):
        return None
    outlines = _outlines(weights, dtype, bucket_bytes, manager.rank)
    before = buckets_by_slots(previous if manager.rank == 0 else None)
    old = [before.get(one.slots) for one in outlines]
    seen = _shared(manager, outlines, [None if one is None else one.data for one in old])
    changed = _agreed(
        manager,
        [
            memory is None or _differs(one, memory)
            for one, memory in zip(outlines, seen, strict=True)
        ],
        dist.ReduceOp.MAX,
    )
    new = _shared(manager, outlines, _allocated(manager, outlines, changed, allocate))
    there = [not due or memory is not None for due, memory in zip(changed, new, strict=True)]
    if not all(_agreed(manager, there, dist.ReduceOp.MIN)):
        return None
    due = {i: memory for i, memory in enumerate(new) if changed[i] and memory is not None}
    for i, memory in due.items():
        _write(outlines[i], memory, gaps=manager.rank == 0)
    ranks.wait_for_all(manager)
    checksums = _hashed(manager, list(due.values()))
    if manager.rank:
        return pack({}, version)
    for (i, memory), checksum in zip(due.items(), checksums, strict=True):
        old[i] = WeightBucket(outlines[i].slots, memory, checksum)
    buckets = tuple(one for one in old if one is not None)
    return WeightUpdate(version, buckets, update_checksum(version, buckets))


def _by_rows(tensors: Iterable[Tensor]) -> bool:
    sharded = [one for one in tensors if isinstance(one, DTensor)]
    return all(one.device_mesh.ndim == 1 and one.placements == (Shard(0),) for one in sharded)


def _on_one_host(manager: FSDPModelManager, allocate: Allocate | None) -> bool:
    mine = torch.tensor([this_host(), int(allocate is not None)])
    found = [one.tolist() for one in ranks.all_gather(manager, mine)]
    return bool(found[0][1]) and len({host for host, _ in found}) == 1


def _outlines(weights: Weights, dtype: torch.dtype, bucket_bytes: int, rank: int) -> list[Outline]:
    plain = {}
    for name, one in weights.slices.items():
        live = weights.memory[one.tensor]
        kind = dtype if live.is_floating_point() else live.dtype
        plain[name] = torch.empty(one.shape, dtype=kind, device="meta")
    found = []
    for group in grouped(plain, bucket_bytes):
        slots, size = slots_of(group)
        rows = []
        for slot in slots:
            one = weights.slices[slot.name]
            held = _held(weights.memory[one.tensor], one, rank)
            if held is not None:
                part, before = held
                kind = plain[slot.name].dtype
                rows.append(Rows(part, kind, slot.offset + before * kind.itemsize))
        found.append(Outline(slots, size, rows))
    return found


def _held(live: Tensor, wanted: Slice, rank: int) -> tuple[Tensor, int] | None:
    """Return the elements of a slice that this rank writes, and how many of it lie before them."""
    local = local_shard(live).detach()
    first = 0
    if isinstance(live, DTensor):
        first = first_row(live) * math.prod(live.shape[1:])
    elif rank:
        return None  # the same on all ranks: rank 0 writes it
    start = max(wanted.offset, first)
    end = min(wanted.offset + wanted.elements, first + local.numel())
    if start >= end:
        return None
    return local.reshape(-1)[start - first : end - first], start - wanted.offset


def _shared(
    manager: FSDPModelManager,
    outlines: Sequence[Outline],
    memories: Sequence[Memory | None] | None,
) -> list[Memory | None]:
    """Return the memory of rank 0, on every rank; None where this rank cannot map it."""
    places: list[Place | None] | None = None
    if manager.rank == 0 and memories is not None:
        there = [one for one in memories if one is not None]
        found = iter(places_of(there))
        places = [None if one is None else next(found) for one in memories]
    content = ranks.broadcast_bytes(manager, msgspec.msgpack.encode(places))
    places = msgspec.msgpack.decode(content, type=list[Place | None] | None)
    if places is None:
        raise FSDPError("rank 0 has no memory to publish weights from; see that rank's error")
    if manager.rank == 0 and memories is not None:
        return [
            None if place is None else memory
            for memory, place in zip(memories, places, strict=True)
        ]
    return [_mapped(place, one.size) for place, one in zip(places, outlines, strict=True)]


def _mapped(place: Place | None, size: int) -> Memory | None:
    try:
        return None if place is None else map_place(place, size)
    except (OSError, ValueError):
        return None


def _allocated(
    manager: FSDPModelManager,
    outlines: Sequence[Outline],
    changed: Sequence[bool],
    allocate: Allocate | None,
) -> list[Memory | None]:
    if manager.rank or allocate is None:
        return []
    try:
        return [
            allocate(one.size) if due else None for one, due in zip(outlines, changed, strict=True)
        ]
    except BaseException:
        # The other ranks wait for the places of the buckets.
        ranks.broadcast_bytes(manager, msgspec.msgpack.encode(None))
        raise


def _agreed(
    manager: FSDPModelManager, flags: Sequence[bool], operation: dist.ReduceOp.RedOpType
) -> list[bool]:
    row = torch.tensor(flags, dtype=torch.int32, device=manager.device)
    ranks.all_reduce(manager, row, operation)
    return [bool(one) for one in row.tolist()]


def _differs(outline: Outline, memory: Memory) -> bool:
    """Whether this rank's rows differ from those in memory: a few elements first, then all."""
    bucket = torch.from_numpy(memory)
    return any(rows.differ(bucket, GLANCE) for rows in outline.rows) or any(
        rows.differ(bucket) for rows in outline.rows
    )


def _write(outline: Outline, memory: Memory, *, gaps: bool) -> None:
    bucket = torch.from_numpy(memory)
    for rows in outline.rows:
        rows.write(bucket)
    end = 0
    for slot in outline.slots if gaps else ():
        bucket[end : slot.offset] = 0
        end = slot.offset + math.prod(slot.shape) * getattr(torch, slot.dtype).itemsize


def _hashed(manager: FSDPModelManager, memories: Sequence[Memory]) -> list[int]:
    """Return every bucket's checksum, each taken by one rank."""
    mine = np.zeros(len(memories), np.uint64)
    for i in range(manager.rank, len(memories), manager.world_size):
        mine[i] = data_checksum(memories[i])
    row = torch.from_numpy(mine.view(np.int64)).to(manager.device)
    ranks.all_reduce(manager, row)
    return [int(one) for one in row.cpu().numpy().view(np.uint64)]
