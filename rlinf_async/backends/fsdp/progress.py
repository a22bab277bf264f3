"""What an active rank knows besides its shards: counters, schedule, and the optimizer's settings.

Every active rank knows the same; rank 0's goes to those that join.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn

from rlinf_async.backends.fsdp.sharding import local_shard
from rlinf_async.backends.fsdp.skeleton import like

if TYPE_CHECKING:
    from rlinf_async.backends.fsdp.manager import ShardedModelManager


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plain data: it travels as bytes."""

    steps: int
    skipped_steps: int
    scaler: tuple[float, int]
    """factor, good steps"""
    groups: list[dict[str, Any]]
    """the optimizer's, without their parameters"""
    schedule: dict[str, Any]
    optimizer_steps: dict[str, float]
    """by the name of a parameter that has moments"""


def progress_of(manager: ShardedModelManager) -> Progress:
    """Return what an active rank knows besides its shards."""
    state = manager.optimizer.state
    return Progress(
        steps=manager.steps,
        skipped_steps=manager.skipped_steps,
        scaler=(manager.grad_scaler.factor, manager.grad_scaler.good_steps),
        groups=[
            {key: value for key, value in group.items() if key != "params"}
            for group in manager.optimizer.param_groups
        ],
        schedule=manager.lr_scheduler.state_dict(),
        optimizer_steps={
            name: float(state[parameter]["step"])
            for name, parameter in manager.model.named_parameters()
            if parameter in state
        },
    )


def moments(manager: ShardedModelManager, key: str) -> dict[str, Tensor]:
    """Return this rank's shards of one kind of moment, by the name of the parameter."""
    if not manager.active:
        return {}
    state = manager.optimizer.state
    return {
        name: local_shard(state[parameter][key])
        for name, parameter in manager.model.named_parameters()
        if parameter in state
    }


def fill_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    progress: Progress,
    stepped: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Give an optimizer the settings that were in force, and these moments' shards."""
    for group, settings in zip(optimizer.param_groups, progress.groups, strict=True):
        group |= settings
        group["betas"] = tuple(group["betas"])
    for name, parameter in model.named_parameters():
        if name not in progress.optimizer_steps:
            continue
        shards = {key: of_kind[name] for key, of_kind in stepped.items()}
        give_moments(optimizer, parameter, progress.optimizer_steps[name], shards)


def give_moments(
    optimizer: torch.optim.Optimizer, parameter: Tensor, steps: float, shards: Mapping[str, Tensor]
) -> None:
    """Make these very shards, by kind, what an optimizer remembers of a parameter."""
    # The fused optimizer keeps the step beside its parameter.
    step = torch.tensor(steps, dtype=torch.float32, device=parameter.device)
    plain = parameter.detach()
    optimizer.state[parameter] = {"step": step} | {
        key: like(plain, shard) for key, shard in shards.items()
    }
