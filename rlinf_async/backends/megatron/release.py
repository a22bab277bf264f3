"""Freeing the memory of a part of a model that another one replaces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlinf_async.backends.megatron.buffers import buffers_of
from rlinf_async.backends.megatron.manager import RankModel
from rlinf_async.backends.megatron.shards import state_of
from rlinf_async.backends.rescale.release import Storages, collect_unless_freed


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
