"""A model without storage, from which the model of any number of ranks is built.

::

    module, before it is sharded --deepcopy--> meta model, on torch's meta device
    meta model --deepcopy--> sharded over n ranks --shards put in--> a model that trains

Invariant: a meta model has no storage, and what is built from it shares nothing with the model that
trains meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_async.backends.fsdp.sharding import Shards, local_shard, shard, sharded_like
from rlinf_async.parallel import GlobalTensor, Model, Parameter


def meta_copy(module: nn.Module) -> nn.Module:
    """Return a copy of an unsharded model on the meta device. Tied parameters stay tied."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(module, memo)


def describe(meta_model: nn.Module) -> Model:
    """Return the model's parameters, which are sharded, and buffers, which every rank has whole."""
    return Model(
        tuple(
            Parameter(
                name=name,
                tensors=(GlobalTensor(name, tuple(one.shape), str(one.dtype).split(".")[-1]),),
                sharded=isinstance(one, nn.Parameter),
            )
            for name, one in (*meta_model.named_parameters(), *meta_model.named_buffers())
        )
    )


def select(model: Model, names: frozenset[str]) -> Model:
    """Return the part of a description with these names."""
    return Model(tuple(one for one in model.parameters if one.name in names))


def shards_of(model: nn.Module) -> Shards:
    """Return what this rank holds of a live model's parameters and buffers, not copied."""
    held = {name: local_shard(one).detach() for name, one in model.named_parameters()}
    return held | dict(model.named_buffers())


def build_from_shards(
    meta_model: nn.Module,
    shards: Mapping[str, Tensor],
    world_size: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> nn.Module:
    """Return a model over ``world_size`` ranks (FSDP2) that holds these very shards."""
    model = shard(copy.deepcopy(meta_model), "fsdp2", world_size, device, group)
    put_shards(model, shards)
    return model


def put_shards(model: nn.Module, shards: Mapping[str, Tensor]) -> None:
    """Make these very shards the parameters and buffers of a sharded model, by name."""
    parts = (*model.named_parameters(), *model.named_buffers())
    # By identity, so that a tied parameter is one parameter again.
    new = {id(one): sharded_like(one, shards[name]) for name, one in parts if name in shards}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, one in table.items():
                if id(one) in new:
                    table[name] = new[id(one)]
    # FSDP inspects new parameters after loading, and pads the shards of uneven ones. Left to the
    # first forward pass, it would replace storage of which there are views already.
    model.load_state_dict({}, strict=False)
