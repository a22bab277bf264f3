"""A model without its numbers, from which the model of any number of ranks is put together.

::

    module, before it is sharded --deepcopy--> skeleton, on torch's meta device
    skeleton --deepcopy--> sharded over n ranks --shards put in place--> a model that trains

Invariant: a skeleton has no storage, and what is put together shares nothing with the model that
trains meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlinf_async.backends.fsdp.sharding import local_shard, shard
from rlinf_async.parallel import GlobalTensor, Model, Parameter


def skeleton_of(module: nn.Module) -> nn.Module:
    """Return a copy of a model that is not sharded, with tensors that have no storage.

    Tied parameters stay tied.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(module, memo)


def described(skeleton: nn.Module) -> Model:
    """Return the model's parameters, which are sharded, and buffers, which every rank has whole."""
    return Model(
        tuple(
            Parameter(
                name=name,
                tensors=(GlobalTensor(name, tuple(one.shape), str(one.dtype).split(".")[-1]),),
                sharded=isinstance(one, nn.Parameter),
            )
            for name, one in (*skeleton.named_parameters(), *skeleton.named_buffers())
        )
    )


def only(model: Model, names: frozenset[str]) -> Model:
    """Return the part of a description with these names."""
    return Model(tuple(one for one in model.parameters if one.name in names))


def shards_of(model: nn.Module) -> dict[str, Tensor]:
    """Return what this rank holds of a live model's parameters and buffers, not copied."""
    held = {name: local_shard(one).detach() for name, one in model.named_parameters()}
    return held | dict(model.named_buffers())


def put_together(
    skeleton: nn.Module,
    shards: Mapping[str, Tensor],
    world_size: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> nn.Module:
    """Return a model over ``world_size`` ranks (FSDP2) that holds these very shards."""
    model = shard(copy.deepcopy(skeleton), "fsdp2", world_size, device, group)
    put_in(model, shards)
    return model


def put_in(model: nn.Module, shards: Mapping[str, Tensor]) -> None:
    """Make these very shards the parameters and buffers of a sharded model, by name."""
    parts = (*model.named_parameters(), *model.named_buffers())
    # By identity, so that a tied parameter is one parameter again.
    new = {id(one): like(one, shards[name]) for name, one in parts if name in shards}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, one in table.items():
                if id(one) in new:
                    table[name] = new[id(one)]
    # FSDP looks at what was put in after loading, and pads the shards of uneven parameters. Left to
    # the first forward pass, it would take their storage away from whoever has a view of it.
    model.load_state_dict({}, strict=False)


def like(target: Tensor, local: Tensor) -> Any:
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
