"""What a rank holds under a strategy: slices of weights, and the optimizer's state of them.

::

    weights            whole parameters of the rank's slice; float32 copies and moments, too, where
                       data ranks have copies of the optimizer
    optimizer's state  a range of each parameter, where data ranks share it (ZeRO 1)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from rlinf_async.backends.megatron.config import Architecture, layout_of
from rlinf_async.backends.megatron.grid import place_of
from rlinf_async.backends.megatron.manager import RankModel, Sharding
from rlinf_async.backends.megatron.model import buffers_of
from rlinf_async.backends.megatron.weights import (
    MOMENTS,
    HeldParameter,
    kept_of,
    pieces_of_range,
    replace_moments,
)
from rlinf_async.backends.rescale.rescale import Storages, collect_unless_freed
from rlinf_async.parallel import DistributedOptimizer, Layout, ModelMismatch, Strategy
from rlinf_async.parallel.sharding import GroupBuffer, Shards
from rlinf_async.parallel.sharding import ShardedParameter as SeenByGroup

MAIN = "main"
"""the weights that the optimizer steps, float32"""
Tensors = Mapping[str, Tensor]
"""flat, by the names of parameters in the whole model"""


class Ranges(msgspec.Struct, frozen=True):
    """`parallel.DistributedOptimizer`, with a buffer for each parameter's range, as Megatron keeps
    them, instead of one for all. Only the first stage has several buckets."""

    bucket_elements: int | None
    replicas: int = 1

    def shards(
        self, held: Sequence[SeenByGroup], ranks: int, label: str = ""
    ) -> tuple[list[GroupBuffer], Shards]:
        """Return each parameter's ranges on ``ranks`` ranks, and the buffers they are in."""
        first = any(one.name.startswith("embedding.") for one in held)
        cut = DistributedOptimizer(bucket_elements=self.bucket_elements if first else None)
        _, found = cut.shards(held, ranks)
        rows = np.zeros((len(held), ranks), np.int64)
        rows[found.parameter, found.shard] = found.stop - found.start
        buffers = [GroupBuffer(one.name, rows[at], (), at) for at, one in enumerate(held)]
        return buffers, found._replace(buffer=found.parameter, offset=np.zeros_like(found.offset))


def state_layout(architecture: Architecture, strategy: Strategy, sharding: Sharding) -> Layout:
    """Return who holds which part of the optimizer's state."""
    if not sharding.distributed:
        return layout_of(architecture, strategy)
    ranges: Any = Ranges(sharding.bucket_elements(strategy.dp))
    return layout_of(architecture, msgspec.structs.replace(strategy, sharding=ranges))


def check_ranges(
    architecture: Architecture,
    held: Sequence[HeldParameter],
    optimizer: Any,
    strategy: Strategy,
    sharding: Sharding,
    rank: int,
) -> None:
    """Raise `ModelMismatch` unless Megatron's optimizer has the ranges of `state_layout`."""
    if not sharding.distributed:
        return
    layout = state_layout(architecture, strategy, sharding)
    expected = {one.name: one for one in layout.of_rank(rank)}
    for one in held:
        kept = kept_of(optimizer, one.parameter)
        start, count = (kept.start, kept.main.numel()) if kept is not None else (0, 0)
        buffer = expected[one.name]
        if (count,) != buffer.shape or tuple(pieces_of_range(one, start, count)) != buffer.pieces:
            raise ModelMismatch(
                f"{strategy.sizes}: Megatron's optimizer of rank {rank} has elements {start} to "
                f"{start + count} of {one.name}, the layout says {buffer.shape[0]} others: "
                f"{buffer.pieces}"
            )


class RankState(NamedTuple):
    """Tensors of this rank by kind, flat, not copied."""

    weights: Tensors
    state: Mapping[str, Tensors]
    """`MAIN` where it is not a view of the weights, and moments if there are any, by kind"""


def state_of(held: Sequence[HeldParameter], optimizer: Any) -> RankState:
    """Return what this rank holds."""
    weights = {one.name: _flat(one.parameter) for one in held}
    state: dict[str, dict[str, Tensor]] = {}
    for one in held:
        kept = kept_of(optimizer, one.parameter)
        if kept is None:
            continue
        if kept.main.dtype != one.parameter.dtype:
            state.setdefault(MAIN, {})[one.name] = _flat(kept.main)
        for kind in MOMENTS if kept.state else ():
            state.setdefault(kind, {})[one.name] = _flat(kept.state[kind])
    return RankState(weights, state)


def stepped_weights(held: Sequence[HeldParameter], optimizer: Any) -> Tensors:
    """Return the weights that this rank's optimizer steps, flat ranges of the parameters."""
    found = {}
    for one in held:
        kept = kept_of(optimizer, one.parameter)
        if kept is not None:
            found[one.name] = _flat(kept.main)
    return found


def set_moments(
    held: Sequence[HeldParameter], optimizer: Any, moments: Mapping[str, Tensors], steps: float
) -> None:
    """Make these very tensors the optimizer's moments."""
    for one in held:
        kept = kept_of(optimizer, one.parameter)
        if kept is None:
            continue
        found = {kind: moments[kind][one.name].view(kept.main.shape) for kind in MOMENTS}
        replace_moments(kept, found, steps)


def unchanged(old: Layout, new: Layout, rank: int) -> set[str]:
    """Return the names of what a rank holds alike under both layouts."""
    before, after = ({one.name: one for one in side.of_rank(rank)} for side in (old, new))
    return {name for name, one in after.items() if before.get(name) == one}


def same_slices(old: Layout, new: Layout, rank: int) -> bool:
    """Whether a rank holds the same under both layouts."""
    before, after = ({one.name: one for one in side.of_rank(rank)} for side in (old, new))
    return bool(before) and before == after


def holds(rank: int, strategy: Strategy) -> bool:
    """Whether a rank takes part in a strategy."""
    return place_of(rank, strategy) is not None


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def take_apart(part: RankModel, other: RankModel | None) -> None:
    """Take a part of a model to pieces, so that no reference cycle holds its memory; tensors that
    ``other`` shares stay."""
    shared = {one.data_ptr() for one in _tensors(other)} if other is not None else set()
    before = Storages(one for one in _tensors(part) if one.data_ptr() not in shared)
    for parameter in (one.parameter for one in part.held):
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        parameter.grad = None
        for name in ("main_grad", "main_param"):
            if hasattr(parameter, name):
                setattr(parameter, name, None)
    groups: list[Any] = []
    for model in part.models:
        groups += [*model.bucket_groups, *model.expert_parallel_bucket_groups]
    buffers = [
        one for model in part.models for one in (*model.buffers, *model.expert_parallel_buffers)
    ]
    for one in getattr(part.optimizer, "chained_optimizers", [part.optimizer]):
        one.optimizer.state.clear()
        one.optimizer.param_groups.clear()
        groups += [g for each in getattr(one, "per_model_bucket_groups", {}).values() for g in each]
        vars(one).clear()
    for thing in (*groups, *(bucket for one in buffers for bucket in one.buckets), *buffers):
        vars(thing).clear()
    collect_unless_freed(before)


def _tensors(part: RankModel) -> Iterator[Tensor]:
    """Yield the large tensors of a part."""
    yield from buffers_of(part.models)
    yield from (one.parameter for one in part.held)
    state = state_of(part.held, part.optimizer).state
    yield from (one for kind in state.values() for one in kind.values())
