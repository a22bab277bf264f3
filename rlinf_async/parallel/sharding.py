"""What the ranks of one data-parallel group do with a parameter: keep it whole, or a range of it
each.

::

    Replicated             every rank has every parameter
    FSDP2                  rows of each parameter, dealt as ``torch.chunk`` does
    FSDP1                  a range of the flat parameter of each unit
    DistributedOptimizer   a range of each bucket of a flat buffer (Megatron)

All of them give a rank *flat ranges* of parameters: elements ``start .. stop`` of the row-major
order, lying at an offset of one of the rank's buffers. That is all a layout needs to know of them.

``replicas`` > 1 shards within ``ranks / replicas`` neighbours and repeats that (hybrid sharding).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from rlinf_async.parallel.regions import Ints


class ShardedParameter(NamedTuple):
    """One parameter as its data-parallel group sees it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    sharded: bool = True
    alone: bool = False
    """whether it has a bucket of its own: an embedding shared by the first and the last stage"""


class Shards(NamedTuple):
    """A shard of each rank of a group. ``[shards]`` many of each; shard-major."""

    shard: Ints
    """number of the shard that holds the range"""
    parameter: Ints
    """index of the parameter"""
    start: Ints
    """first element, row-major"""
    stop: Ints
    """first element behind the range"""
    buffer: Ints
    """index of the buffer in the group's list"""
    offset: Ints
    """elements before it in that buffer"""


class GroupBuffer(NamedTuple):
    """A buffer that every rank of a group has, each with its own rows."""

    name: str
    rows: Ints
    """``[shards]``: the extent of its first dimension"""
    inner: tuple[int, ...]
    """the other dimensions"""
    parameter: int
    """a parameter that is in it, for its dtype"""
    scalar: bool = False


class Replicated(msgspec.Struct, frozen=True, tag="replicated", forbid_unknown_fields=True):
    """Every rank of the group has every parameter whole."""

    @property
    def replicas(self) -> int:
        """Number of copies: as many as ranks."""
        return 1

    def shards(
        self, held: Sequence[ShardedParameter], ranks: int, label: str = ""
    ) -> tuple[list[GroupBuffer], Shards]:
        """Return the buffers of a group of one: the same on each of its ranks."""
        return _with_whole(held, range(len(held)), [], [], 1)


class FSDP2(msgspec.Struct, frozen=True, tag="fsdp2", forbid_unknown_fields=True):
    """torch's ``fully_shard``: rank r has rows ``[r x c, (r + 1) x c)``, ``c = ceil(rows /
    ranks)``.

    The last ranks may have fewer rows or none. Scalars are whole on every rank.
    """

    replicas: int = 1

    def shards(
        self, held: Sequence[ShardedParameter], ranks: int, label: str = ""
    ) -> tuple[list[GroupBuffer], Shards]:
        """Return each parameter's rows on ``ranks`` ranks, and the buffers they are in."""
        shardable = [one.sharded and len(one.shape) > 0 for one in held]
        rows = np.array(
            [one.shape[0] if s else 1 for one, s in zip(held, shardable, strict=True)], np.int64
        )
        elements = np.array([math.prod(one.shape) for one in held], np.int64)
        inner = np.where(rows, elements // np.maximum(rows, 1), 0)
        shard = np.arange(ranks)[:, None]
        whole = ~np.array(shardable, bool)
        chunk = -(-rows // ranks)
        start = np.where(whole, 0, np.minimum(shard * chunk, rows))
        stop = np.where(whole, rows, np.minimum((shard + 1) * chunk, rows))
        held_rows = (stop - start).T.copy()
        buffers = [
            GroupBuffer(one.name, held_rows[i], one.shape[1:], i) if s else _whole(one, i, ranks)
            for i, (one, s) in enumerate(zip(held, shardable, strict=True))
        ]
        index = np.broadcast_to(np.arange(len(held)), start.shape)
        return buffers, Shards(
            np.broadcast_to(shard, start.shape).ravel(),
            index.ravel(),
            (start * inner).ravel(),
            (stop * inner).ravel(),
            index.ravel(),
            np.zeros(start.size, np.int64),
        )


class FSDP1(msgspec.Struct, frozen=True, tag="fsdp1", forbid_unknown_fields=True):
    """torch's ``FullyShardedDataParallel``: the parameters of a unit, flat, in equal ranges.

    A parameter is in the unit whose name is the longest prefix of its own (``""`` is the root).
    With ``use_orig_params`` every parameter starts at a multiple of 16 bytes. The buffers are
    called ``UNIT._flat_param``; those of the root ``_flat_param``."""

    units: tuple[str, ...] = ("",)
    use_orig_params: bool = True
    replicas: int = 1

    def shards(
        self, held: Sequence[ShardedParameter], ranks: int, label: str = ""
    ) -> tuple[list[GroupBuffer], Shards]:
        """Return each parameter's ranges on ``ranks`` ranks, and the flat buffers they are in."""
        units: dict[str, list[int]] = {unit: [] for unit in self.units}
        rest: list[int] = []
        for index, one in enumerate(held):
            if not one.sharded:
                rest.append(index)
                continue
            fitting = [unit for unit in self.units if unit == "" or one.name.startswith(unit + ".")]
            units.setdefault(max(fitting, key=len, default=""), []).append(index)
        made: list[GroupBuffer] = []
        found: list[Shards] = []
        for unit, members in units.items():
            if not members:
                continue
            first = np.zeros(len(members), np.int64)
            end = 0
            for position, index in enumerate(members):
                aligned = max(1, 16 // held[index].item_bytes) if self.use_orig_params else 1
                first[position] = _round_up(end, aligned)
                end = int(first[position]) + math.prod(held[index].shape)
            length = -(-end // ranks)
            name = ".".join(part for part in (unit, "_flat_param", label) if part)
            found.append(
                _ranges(
                    held,
                    members,
                    first,
                    np.zeros(1, np.int64),
                    np.array([length]),
                    ranks,
                    len(made),
                )
            )
            made.append(GroupBuffer(name, np.full(ranks, length), (), members[0]))
        return _with_whole(held, rest, made, found, ranks)


class DistributedOptimizer(
    msgspec.Struct, frozen=True, tag="distributed_optimizer", forbid_unknown_fields=True
):
    """Megatron's: parameters in reverse order in one buffer per dtype; each rank has a part of
    each bucket.

    Parameters start at multiples of 64 elements; a bucket ends at a multiple of ``lcm(ranks,
    128)`` once it has ``bucket_elements``. A rank's parts lie one behind the other in a buffer
    called ``optimizer.DTYPE``. Source: ``megatron/core/distributed/param_and_grad_buffer.py``,
    megatron-core 0.16."""

    bucket_elements: int | None = None
    replicas: int = 1
    buffer: str = "optimizer"

    def shards(
        self, held: Sequence[ShardedParameter], ranks: int, label: str = ""
    ) -> tuple[list[GroupBuffer], Shards]:
        """Return each parameter's ranges on ``ranks`` ranks, and the buffers they are in."""
        made: list[GroupBuffer] = []
        found: list[Shards] = []
        rest = [index for index, one in enumerate(held) if not one.sharded]
        for dtype in sorted({one.dtype for one in held if one.sharded}):
            members = [
                index
                for index in reversed(range(len(held)))
                if held[index].sharded and held[index].dtype == dtype
            ]
            first, ends = self._positions([held[index] for index in members], ranks)
            starts = np.concatenate([[0], ends[:-1]])
            found.append(
                _ranges(held, members, first, starts, (ends - starts) // ranks, ranks, len(made))
            )
            rows = np.full(ranks, ends[-1] // ranks)
            name = ".".join(part for part in (self.buffer, dtype, label) if part)
            made.append(GroupBuffer(name, rows, (), members[0]))
        return _with_whole(held, rest, made, found, ranks)

    def _positions(self, members: Sequence[ShardedParameter], ranks: int) -> tuple[Ints, Ints]:
        """Where each parameter starts in the buffer, and where each bucket ends."""
        divisor = math.lcm(ranks, 128)
        limit = math.inf if self.bucket_elements is None else self.bucket_elements
        first: list[int] = []
        ends: list[int] = []
        at = bucket = 0
        for one in members:
            at = _round_up(at, 64)
            if one.alone and at > bucket:
                at = bucket = _round_up(at, divisor)
                ends.append(at)
            first.append(at)
            at += math.prod(one.shape)
            if one.alone or at - bucket >= limit:
                at = bucket = _round_up(at, divisor)
                ends.append(at)
        if not ends or at > ends[-1]:
            ends.append(_round_up(at, divisor))
        return np.array(first, np.int64), np.array(ends, np.int64)


Sharding: TypeAlias = Replicated | FSDP2 | FSDP1 | DistributedOptimizer


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _whole(one: ShardedParameter, index: int, ranks: int) -> GroupBuffer:
    if not one.shape:
        return GroupBuffer(one.name, np.ones(ranks, np.int64), (), index, scalar=True)
    return GroupBuffer(one.name, np.full(ranks, one.shape[0]), one.shape[1:], index)


def _ranges(
    held: Sequence[ShardedParameter],
    members: Sequence[int],
    first: Ints,
    bucket_start: Ints,
    share: Ints,
    ranks: int,
    buffer: int,
) -> Shards:
    """Cut parameters that lie at ``first`` in one flat buffer into equal shares of each of its
    buckets.

    ``bucket_start`` and ``share`` are ``[buckets]``; a rank's shares lie one behind the other.
    """
    size = np.array([math.prod(held[index].shape) for index in members], np.int64)
    bucket = np.searchsorted(bucket_start, first, "right") - 1
    shard = np.arange(ranks)[:, None]
    low = bucket_start[bucket] + shard * share[bucket]
    start = np.clip(low - first, 0, size)
    stop = np.clip(low + share[bucket] - first, 0, size)
    packed = np.concatenate([[0], np.cumsum(share)[:-1]])[bucket]
    offset = packed + np.maximum(first - low, 0)
    return Shards(
        np.broadcast_to(shard, start.shape).ravel(),
        np.broadcast_to(np.array(members), start.shape).ravel(),
        start.ravel(),
        stop.ravel(),
        np.full(start.size, buffer),
        offset.ravel(),
    )


def _with_whole(
    held: Sequence[ShardedParameter],
    rest: Sequence[int],
    made: list[GroupBuffer],
    found: list[Shards],
    ranks: int,
) -> tuple[list[GroupBuffer], Shards]:
    """Add the parameters that every rank keeps whole."""
    for index in rest:
        zero = np.zeros(ranks, np.int64)
        size = np.full(ranks, math.prod(held[index].shape))
        found.append(Shards(np.arange(ranks), zero + index, zero, size, zero + len(made), zero))
        made.append(_whole(held[index], index, ranks))
    if not found:
        return made, Shards(*(np.zeros(0, np.int64) for _ in Shards._fields))
    return made, Shards(*(np.concatenate(column) for column in zip(*found, strict=True)))
