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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlinf_async.algorithms.losses import truncated_weights, weighted_mean
from rlinf_async.backends.checkpoint import collectives
from rlinf_async.backends.fsdp.config import PPOConfig
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.ppo import FlatBatch, at_level


def corrected(
    manager: FSDPModelManager, batch: FlatBatch, config: PPOConfig
) -> tuple[FlatBatch, Mapping[str, float]]:
    """Return the batch as the present policy trains on it, and metrics. Collective.

    ``log_prob`` and ``value`` become those of the present policy; `FlatBatch.correction` are the
    weights. The metrics are means over what counts: of the weights, of their distance from 1, and
    the share of them that was above the cap.

    Raises:
        ValueError: ranks have different numbers of samples.
    """
    samples = len(batch.action)
    collectives.require_equal(manager, samples, "the number of samples")
    if not samples:
        return batch, {}
    behaviour = batch.log_prob
    size = config.micro_batch_size or config.minibatch_size
    batch = batch._replace(**_of_present(manager, batch, size))
    if config.loss.off_policy == "none":
        return batch, {}
    weights = truncated_weights(batch.log_prob - behaviour, config.loss.off_policy_cap)
    means = {
        name: float(weighted_mean(column, batch.weight)) for name, column in weights.columns.items()
    }
    return batch._replace(correction=weights.weight), means


@torch.no_grad()
def _of_present(manager: FSDPModelManager, batch: FlatBatch, size: int) -> dict[str, Tensor]:
    """Log-probs and values of the present policy, as many for a sample as ``batch`` has."""
    log_probs, values = list[Tensor](), list[Tensor]()
    with _acting(manager.model):
        for piece in batch.split(size):
            with manager.autocast():
                evaluation = manager.model(piece.observation, piece.action)
            log_prob, _, value = at_level(evaluation, piece)
            log_probs.append(log_prob)
            values.append(value)
    return {"log_prob": torch.cat(log_probs), "value": torch.cat(values)}


@contextmanager
def _acting(model: nn.Module) -> Iterator[None]:
    """Let dropout and statistics of batches be as they are where a policy acts."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
