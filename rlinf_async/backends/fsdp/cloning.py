"""Behaviour cloning: the policy learns to do what demonstrations show, before reinforcement.

The loss is the mean negative log-prob of the demonstrated actions, or of their tokens. All ranks
draw the same samples and take a share each, so that the numbers do not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_async.backends.fsdp import ranks
from rlinf_async.backends.fsdp.config import CloningConfig
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.policies.base import Evaluation, Policy
from rlinf_async.backends.policies.moments import batch_moments
from rlinf_async.backends.policies.tensors import to_tensors
from rlinf_async.data.demonstrations import Chunks, chunks_of, read_episodes
from rlinf_async.messages.spaces import ObservationSpec, numbers_of


def clone(
    manager: FSDPModelManager,
    policy: Policy[Any],
    config: CloningConfig,
    *,
    seen: ObservationSpec,
    chunk: int,
    seed: int,
    normalize: bool,
    on_step: Callable[[int], None] | None = None,
) -> Mapping[str, float]:
    """Train ``config.steps`` optimizer steps on the demonstrations; return metrics. Collective.

    The optimizer begins anew afterwards: its moments are of another loss. Raises `DataError` for
    demonstrations that cannot be read.
    """
    samples = chunks_of(list(read_episodes(Path(config.demonstrations), seen)), chunk)
    if normalize and (numbers := numbers_of(samples.observation)) is not None:
        states = torch.from_numpy(np.ascontiguousarray(numbers)).to(manager.device)
        policy.observation_normalizer.merge(batch_moments(states))
    _set_rate(manager, config.lr)
    generator = np.random.default_rng(seed)
    losses: list[float] = []
    for step in range(config.steps):
        losses.append(_step(manager, policy, samples, generator, config))
        if on_step is not None:
            on_step(step + 1)
    manager.restart_optimizer()
    last = losses[-max(1, len(losses) // 10) :]
    return {
        "cloning_steps": float(config.steps),
        "cloning_samples": float(len(samples.action)),
        "cloning_loss": float(np.mean(last)),
    }


def _step(
    manager: FSDPModelManager,
    policy: Policy[Any],
    samples: Chunks,
    generator: np.random.Generator,
    config: CloningConfig,
) -> float:
    """One optimizer step; returns this rank's share of the loss."""
    drawn = generator.integers(len(samples.action), size=config.batch_size)
    mine = np.array_split(drawn, manager.world_size)[manager.rank]
    count = float(samples.there[drawn].sum()) / manager.world_size
    observation = policy.normalized(to_tensors(samples.observation[mine], manager.device))
    action = torch.from_numpy(samples.action[mine]).to(manager.device)
    action = action if action.ndim == 1 else action.flatten(1)
    there = torch.from_numpy(samples.there[mine]).to(manager.device)
    with manager.autocast(), manager.before_micro_batch(manager.model, is_last_micro_batch=True):
        evaluation: Evaluation = manager.model(observation, action)
        loss = _loss(evaluation.log_prob.float(), there, count)
        manager.backward(loss)
    manager.optimizer_step()
    total = loss.detach().clone()
    ranks.all_reduce(manager, total)
    return float(total) / manager.world_size


def _loss(log_prob: Tensor, there: Tensor, count: float) -> Tensor:
    """Minus the log-prob of an action, mean over ``count`` actions of this rank."""
    if log_prob.ndim == 1:  # of a whole chunk: one that an episode's end cut is left out
        return -torch.where(there.all(1), log_prob, 0.0).sum() * there.shape[1] / count
    action = log_prob.view(len(log_prob), there.shape[1], -1).mean(-1)
    return -torch.where(there, action, 0.0).sum() / count


def _set_rate(manager: FSDPModelManager, rate: float) -> None:
    for group in manager.optimizer.param_groups:
        group["lr"] = rate
        group["frozen"] = False
