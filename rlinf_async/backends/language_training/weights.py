"""Weights of a model that several ranks hold: published in place, and kept on the CPU by tag.

::

    rank 0   shares the last update    -> all ranks compare their parts -> changed buckets (max)
    rank 0   allocates changed buckets -> all ranks map them            -> whether all could (min)
    a rank   writes its parts          -> waits for all ranks
    rank r   hashes buckets r, r + n.. -> sum -> rank 0 builds the update

    actor ----backup----> kept[tag]      ref, old_actor, rollout_actor
    live model <--switch-- kept[tag]     the actor's own are kept meanwhile

Invariant: nothing is gathered to be published, but the factors of an adapter. A rank converts its
own part of one tensor at a time, and the result is, bit for bit, the update that rank 0 would have
packed of whole tensors. Every rank decides the same, by collectives in the group of the active
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlinf_async.backends.checkpoint.collectives import (
    Rank,
    all_gather,
    all_reduce,
    broadcast_bytes,
    wait_for_all,
)
from rlinf_async.messages.weights import (
    Allocate,
    TensorSlot,
    WeightBucket,
    WeightsError,
    WeightUpdate,
)
from rlinf_async.weights.memory_files import FilePlace, map_place, places_of, this_host
from rlinf_async.weights.pack import (
    GLANCE,
    buckets_by_slots,
    data_checksum,
    elements_of,
    grouped,
    pack,
    slots_of,
    update_checksum,
)

Memory = NDArray[np.uint8]


class NotPublished(WeightsError):
    """Rank 0 has no memory for an update."""


class PlacedPart(NamedTuple):
    """Elements of a published tensor that this rank writes."""

    live: Tensor
    """``[size]``, of any dtype"""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """elements of the published tensor, as in `torch.as_strided`"""
    offset: int
    """elements of it, seen flat, before the first"""
    update: Callable[[], Tensor] | None = None
    """computes what is added to ``live`` where it is published, in its shape; None: nothing"""

    def elements(self) -> Tensor:
        """Return what is published, before it is converted."""
        live = self.live.detach()
        return live if self.update is None else live + self.update()


class OwnParts(NamedTuple):
    """A rank's share of published weights."""

    tensors: Mapping[str, Tensor]
    """what is published, in the same order on all ranks, without memory (meta)"""
    parts: Mapping[str, Sequence[PlacedPart]]
    """parts that this rank writes, by name; those of all ranks make up the whole"""


class _Placed(NamedTuple):
    """A part, and where its tensor lies in a bucket."""

    part: PlacedPart
    slot: TensorSlot

    def differs(self, bucket: Tensor, limit: int | None = None) -> bool:
        """Whether the bucket has other elements there; only about ``limit`` are compared."""
        target, live = self._target(bucket), self.part.elements()
        if limit is not None:
            rows = -(-limit // max(1, math.prod(self.part.size[1:])))
            target, live = target[:rows], live[:rows]
        return not torch.equal(elements_of(target), elements_of(live.to(target.dtype)))

    def write(self, bucket: Tensor) -> None:
        """Copy the elements into the bucket."""
        target = self._target(bucket)
        target.copy_(self.part.elements().to(target.dtype))

    def _target(self, bucket: Tensor) -> Tensor:
        part, begin = self.part, self.slot.offset
        tensor = bucket[begin : begin + _bytes_of(self.slot)].view(_dtype_of(self.slot))
        base = tensor.storage_offset()
        return tensor.as_strided(part.size, part.stride, base + part.offset)


class _Outline(NamedTuple):
    """A bucket without its bytes."""

    slots: tuple[TensorSlot, ...]
    size: int
    """size in bytes"""
    parts: list[_Placed]
    """parts of this rank"""


def publish_in_place(
    member: Rank,
    own: OwnParts,
    version: int,
    bucket_bytes: int,
    *,
    allocate: Allocate | None,
    previous: WeightUpdate | None,
) -> WeightUpdate | None:
    """Return weights as `weights.pack` packs whole ones on rank 0, without buckets elsewhere.

    Args:
        member: this rank; collective over the active ranks.
        own: what this rank writes.
        version: version of the update.
        bucket_bytes: size from which a bucket is full.
        allocate: gives memory for a bucket; only that of rank 0 is used, as with ``previous``.
        previous: update whose buckets are taken over where nothing in them has changed.

    Returns None, on all ranks, where weights have to be gathered: for several hosts, or memory that
    the ranks cannot map. Raises `NotPublished` where rank 0 could not allocate; that one has its
    own error.
    """
    if not _on_one_host(member, allocate):
        return None
    outlines = _outlines(own, bucket_bytes)
    before = buckets_by_slots(previous if member.rank == 0 else None)
    old = [before.get(one.slots) for one in outlines]
    seen = _shared(member, outlines, [None if one is None else one.data for one in old])
    changed = _agreed(
        member,
        [
            memory is None or _differs(one, memory)
            for one, memory in zip(outlines, seen, strict=True)
        ],
        dist.ReduceOp.MAX,
    )
    new = _shared(member, outlines, _allocated(member, outlines, changed, allocate))
    there = [not due or memory is not None for due, memory in zip(changed, new, strict=True)]
    if not all(_agreed(member, there, dist.ReduceOp.MIN)):
        return None
    due = {i: memory for i, memory in enumerate(new) if changed[i] and memory is not None}
    for i, memory in due.items():
        _write(outlines[i], memory, gaps=member.rank == 0)
    wait_for_all(member)
    checksums = _hashed(member, list(due.values()))
    if member.rank:
        return pack({}, version)
    for (i, memory), checksum in zip(due.items(), checksums, strict=True):
        old[i] = WeightBucket(outlines[i].slots, memory, checksum)
    buckets = tuple(one for one in old if one is not None)
    return WeightUpdate(version, buckets, update_checksum(version, buckets))


def _on_one_host(member: Rank, allocate: Allocate | None) -> bool:
    mine = torch.tensor([this_host(), int(allocate is not None)])
    found = [one.tolist() for one in all_gather(member, mine)]
    return bool(found[0][1]) and len({host for host, _ in found}) == 1


def _outlines(own: OwnParts, bucket_bytes: int) -> list[_Outline]:
    found = []
    for group in grouped(own.tensors, bucket_bytes):
        slots, size = slots_of(group)
        mine = [_Placed(part, slot) for slot in slots for part in own.parts.get(slot.name, ())]
        found.append(_Outline(slots, size, mine))
    return found


def _shared(
    member: Rank, outlines: Sequence[_Outline], memories: Sequence[Memory | None] | None
) -> list[Memory | None]:
    """Return the memory of rank 0, on every rank; None where this rank cannot map it."""
    places: list[FilePlace | None] | None = None
    if member.rank == 0 and memories is not None:
        there = [one for one in memories if one is not None]
        found = iter(places_of(there))
        places = [None if one is None else next(found) for one in memories]
    content = broadcast_bytes(member, msgspec.msgpack.encode(places))
    places = msgspec.msgpack.decode(content, type=list[FilePlace | None] | None)
    if places is None:
        raise NotPublished("rank 0 has no memory to publish weights from; see that rank's error")
    if member.rank == 0 and memories is not None:
        return [
            None if place is None else memory
            for memory, place in zip(memories, places, strict=True)
        ]
    return [_mapped(place, one.size) for place, one in zip(places, outlines, strict=True)]


def _mapped(place: FilePlace | None, size: int) -> Memory | None:
    try:
        return None if place is None else map_place(place, size)
    except (OSError, ValueError):
        return None


def _allocated(
    member: Rank,
    outlines: Sequence[_Outline],
    changed: Sequence[bool],
    allocate: Allocate | None,
) -> list[Memory | None]:
    if member.rank or allocate is None:
        return []
    try:
        return [
            allocate(one.size) if due else None for one, due in zip(outlines, changed, strict=True)
        ]
    except BaseException:
        # The other ranks wait for the places of the buckets.
        broadcast_bytes(member, msgspec.msgpack.encode(None))
        raise


def _agreed(member: Rank, flags: Sequence[bool], operation: dist.ReduceOp.RedOpType) -> list[bool]:
    row = torch.tensor(flags, dtype=torch.int32, device=member.device)
    all_reduce(member, row, operation)
    return [bool(one) for one in row.tolist()]


def _differs(outline: _Outline, memory: Memory) -> bool:
    """Whether this rank's parts differ from those in memory: a few elements first, then all."""
    bucket = torch.from_numpy(memory)
    return any(one.differs(bucket, GLANCE) for one in outline.parts) or any(
        one.differs(bucket) for one in outline.parts
    )


def _write(outline: _Outline, memory: Memory, *, gaps: bool) -> None:
    bucket = torch.from_numpy(memory)
    for one in outline.parts:
        one.write(bucket)
    end = 0
    for slot in outline.slots if gaps else ():
        bucket[end : slot.offset] = 0
        end = slot.offset + _bytes_of(slot)


def _dtype_of(slot: TensorSlot) -> torch.dtype:
    found: torch.dtype = getattr(torch, slot.dtype)
    return found


def _bytes_of(slot: TensorSlot) -> int:
    return math.prod(slot.shape) * _dtype_of(slot).itemsize


def _hashed(member: Rank, memories: Sequence[Memory]) -> list[int]:
    """Return every bucket's checksum, each taken by one rank."""
    mine = np.zeros(len(memories), np.uint64)
    for i in range(member.rank, len(memories), member.world_size):
        mine[i] = data_checksum(memories[i])
    row = torch.from_numpy(mine.view(np.int64)).to(member.device)
    all_reduce(member, row)
    return [int(one) for one in row.cpu().numpy().view(np.uint64)]


REFERENCE = "ref"
STEP = "step"
"""the weights that the iteration began with"""
ACTOR = "actor"
"""the weights that are trained"""


class KeptWeightsError(ValueError):
    """No weights have that tag, or they are of another model."""


class HoldsWeights(Protocol):
    """A model manager, as far as other weights are concerned."""

    kept: dict[str, dict[str, Tensor]]
    """other weights, by tag and name: this rank's part, on the CPU"""

    def live_weights(self) -> dict[str, Tensor]:
        """Return this rank's part of the weights that are trained, by name: the memory itself."""
        ...

    def settle_checkpoint(self) -> None:
        """Return when no checkpoint reads the weights any more."""
        ...


class KeptWeights:
    """Copies of this rank's part of a model's weights, by tag.

    The manager holds them, so that they move when the number of ranks changes. While another tag
    is active, the weights that are trained are one of the copies: training, checkpoints and
    publishing have to switch back to `ACTOR` first.
    """

    def __init__(self, manager: HoldsWeights) -> None:
        self._manager = manager
        self.active = ACTOR
        """tag of the weights in the model"""

    @property
    def tags(self) -> list[str]:
        """Tags of the copies that are kept."""
        return list(self._manager.kept)

    def backup(self, tag: str) -> None:
        """Keep a copy of the weights that are trained under a tag."""
        self.copy(ACTOR, tag)

    def copy(self, source: str, target: str) -> None:
        """Keep the weights of one tag under another, too.

        Raises `KeptWeightsError` for an unknown tag.
        """
        found = self._manager.live_weights() if source == self.active else self._kept(source)
        self._manager.kept[target] = _copies(found)

    def drop(self, tag: str) -> None:
        """Free a copy. Raises `KeptWeightsError` for an unknown tag."""
        self._kept(tag)
        del self._manager.kept[tag]

    def of(self, tag: str) -> Mapping[str, Tensor]:
        """Return this rank's part of the weights kept under a tag."""
        return self._kept(tag)

    def put(self, tag: str, shards: Mapping[str, Tensor]) -> None:
        """Keep what `of` returned on the same rank of as many, under the same strategy.

        Raises `KeptWeightsError` where names or shapes are not those of this rank's part.
        """
        self._check_same(tag, shards)
        self._manager.kept[tag] = dict(shards)

    def keep(self, tag: str, other: HoldsWeights) -> None:
        """Keep the weights of another model of the same shape and sharding."""
        theirs = other.live_weights()
        self._check_same(tag, theirs)
        self._manager.kept[tag] = _copies(theirs)

    def _check_same(self, tag: str, theirs: Mapping[str, Tensor]) -> None:
        shapes, wanted = _shapes(theirs), _shapes(self._manager.live_weights())
        differing = sorted(name for name, _ in shapes.items() ^ wanted.items())
        if differing:
            name = differing[0]
            raise KeptWeightsError(
                f"the weights for {tag!r} are of another model: {name} is "
                f"{shapes.get(name, 'not')} there and {wanted.get(name, 'not')} here"
            )

    def switch(self, tag: str) -> None:
        """Put the weights of a tag into the model. Raises `KeptWeightsError` for an unknown tag."""
        if tag == self.active:
            return
        found = self._kept(tag)
        self._manager.settle_checkpoint()
        if self.active == ACTOR:
            self.backup(ACTOR)
        _copy(found, self._manager.live_weights())
        self.active = tag
        if tag == ACTOR:
            del self._manager.kept[ACTOR]  # they are in the model again

    @contextmanager
    def swapped_in(self, tag: str = REFERENCE) -> Iterator[None]:
        """Switch to a tag for the block, and back after it."""
        before = self.active
        self.switch(tag)
        try:
            yield
        finally:
            self.switch(before)

    def _kept(self, tag: str) -> dict[str, Tensor]:
        if tag not in self._manager.kept:
            raise KeptWeightsError(
                f"no weights are kept as {tag!r}; there are: {', '.join(self.tags) or 'none'}"
            )
        return self._manager.kept[tag]


def _copies(shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach().to("cpu", copy=True) for name, one in shards.items()}


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, one in target.items():
            one.copy_(source[name])


def _shapes(shards: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in shards.items()}
