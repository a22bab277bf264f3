"""Batches for which an older policy acted: what the ratio is relative to, and what samples weigh.

PPO keeps the policy near the one that acted. Where that one is some versions old, the ratio is far
from 1 before the first update, and what is beyond its limits learns nothing. Decoupled PPO (Hilton
et al. 2022, "Batch size-invariance for policy optimization") keeps it near the proximal policy::

    behaviour    acted                        weight = min(proximal / behaviour, off_policy_cap)
    proximal     begins the iteration         ratio  = trained / proximal, clipped
    trained      changes from update to update

The loss of a sample is the weight times that of PPO. Where the behaviour policy is the proximal
one, so is the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlinf_async.backends.checkpoint import collectives
from rlinf_async.backends.fsdp.config import OF_CORRECTION, PPOConfig
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.ppo import FlatBatch, at_level
from rlinf_async.messages.embodied import Trajectory


def behind(member: collectives.Rank, trajectories: Sequence[Trajectory], version: int) -> bool:
    """Whether older weights than ``version`` acted in a step, on any rank. Collective."""
    mine = any(bool((one.version < version).any()) for one in trajectories)
    return any(bool(one) for one in collectives.all_gather(member, torch.tensor([mine])))


def corrected(
    manager: FSDPModelManager, batch: FlatBatch, config: PPOConfig
) -> tuple[FlatBatch, Mapping[str, float]]:
    """Return the batch as the present policy trains on it, and metrics. Collective.

    ``log_prob`` becomes that of the present policy; `FlatBatch.correction` are the weights. The
    metrics are over this rank's samples that count: mean weight, mean distance of the weights from
    1, and the share of them at the cap.

    Raises:
        ValueError: ranks have different numbers of samples.
    """
    collectives.require_equal(manager, len(batch.action), "the number of samples")
    proximal = _log_probs(manager, batch, config.micro_batch_size or config.minibatch_size)
    batch, behaviour = batch._replace(log_prob=proximal), batch.log_prob
    if config.loss.off_policy == "none":
        return batch, {}
    log_ratio, limit = proximal - behaviour, math.log(config.loss.off_policy_cap)
    weight = log_ratio.clamp(max=limit).exp()
    counts = torch.ones_like(weight) if batch.weight is None else batch.weight
    found = (
        one[counts > 0] for one in (weight, (weight - 1.0).abs(), (log_ratio >= limit).float())
    )
    metrics = {name: float(one.mean()) for name, one in zip(OF_CORRECTION, found, strict=True)}
    return batch._replace(correction=weight), metrics


@torch.no_grad()
def _log_probs(manager: FSDPModelManager, batch: FlatBatch, size: int) -> Tensor:
    """Those of the present policy, as many for a sample as ``batch`` has."""
    found: list[Tensor] = []
    for piece in batch.split(size):
        with manager.autocast():
            evaluation = manager.model(piece.observation, piece.action)
        log_prob, *_ = at_level(evaluation, piece)
        found.append(log_prob)
    return torch.cat(found)
