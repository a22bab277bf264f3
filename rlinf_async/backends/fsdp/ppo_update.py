"""PPO's inner loop: epochs x shuffled minibatches over one flat batch.

It waits for no other worker: the batch is complete, and only gradients cross ranks. A minibatch is
one optimizer step; micro-batches split it to save memory, and do not change the numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlinf_async.algorithms.config import LossConfig
from rlinf_async.algorithms.losses import LossInputs, loss_functions
from rlinf_async.backends.base import TrainingDiverged
from rlinf_async.backends.fsdp import levels, ranks
from rlinf_async.backends.fsdp.config import PPOConfig
from rlinf_async.backends.fsdp.fused_ppo import FusedPpo
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.minibatch import METRICS, FlatBatch, Gradient
from rlinf_async.backends.policies.base import Evaluation


class _Totals(NamedTuple):
    """Results of all updates."""

    metrics: list[Tensor]
    grad_norms: list[float]


def ppo_epochs(
    manager: FSDPModelManager,
    batch: FlatBatch,
    config: PPOConfig,
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """Train on ``batch`` and return the means of the metrics over all updates. Collective.

    ``generator`` shuffles; rank r of a sharded run should have its own. The last minibatch of an
    epoch is smaller when the sizes do not divide. Raises `ValueError` for an empty batch or one
    that differs in size between ranks, and `TrainingDiverged` when every update was skipped.
    """
    samples = len(batch.action)
    if not samples:
        raise ValueError("the batch is empty: there is nothing to train on")
    ranks.require_equal(manager, samples, "the number of samples")
    gradient = choose_gradient(manager, config, masked=batch.executed is not None)
    totals = _Totals([], [])
    skipped = manager.skipped_steps
    lrs: list[float] = []
    for _ in range(config.epochs):
        order = torch.randperm(samples, generator=generator).to(batch.action.device)
        before = len(totals.metrics)
        for minibatch in batch.take(order).split(config.minibatch_size):
            if config.normalize_advantage == "minibatch":
                advantage = standardized(minibatch.advantage, minibatch.weight)
                minibatch = minibatch._replace(advantage=advantage)
            totals.metrics.append(_accumulate(manager, gradient, minibatch, config))
            grad_norm, lrs = manager.optimizer_step()
            totals.grad_norms.append(grad_norm)
        if _kl_exceeded(manager, totals.metrics[before:], config.target_kl):
            break
    return _summary(manager, totals, lrs, manager.skipped_steps - skipped)


def standardized(advantage: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return advantages of any shape with mean 0 and (unbiased) standard deviation 1.

    Where ``weight`` is 0 they do not count.
    """
    counted = advantage if weight is None else advantage[weight > 0]
    if counted.numel() < 2:
        return advantage
    deviation, mean = torch.std_mean(counted)
    return advantage.sub(mean).div_(deviation + 1e-8)


def choose_gradient(
    manager: FSDPModelManager, config: PPOConfig, *, masked: bool = False
) -> Gradient:
    """Return the hand-written gradient if it covers this model and loss, else autograd's."""
    if config.fused and not masked and FusedPpo.covers(manager, config.loss):
        return FusedPpo(manager.model, config.loss)
    return AutogradLoss(manager, config.loss)


class AutogradLoss:
    """Any policy, any registered loss, any sharding."""

    def __init__(self, manager: FSDPModelManager, config: LossConfig) -> None:
        self._manager = manager
        self._config = config
        self._loss = loss_functions[config.name]

    def __call__(self, batch: FlatBatch, share: float) -> Tensor:
        """Add ``share`` times the gradient of the mean loss over ``batch``."""
        with self._manager.autocast():
            evaluation: Evaluation = self._manager.model(batch.observation, batch.action)
        log_prob, entropy, value = at_level(evaluation, batch)
        inputs = LossInputs(
            log_prob=log_prob,
            entropy=entropy,
            value=value,
            old_log_prob=batch.log_prob,
            old_value=batch.value,
            advantage=batch.advantage,
            returns=batch.returns,
            weight=batch.weight,
            value_weight=batch.value_weight,
        )
        output = self._loss(inputs, self._config)
        self._manager.backward(output.loss * share)
        return torch.stack([output.metrics[name] for name in METRICS])


def at_level(evaluation: Evaluation, batch: FlatBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies and values, float32, as many for a sample as ``batch`` has."""
    log_prob, entropy = evaluation.log_prob.float(), evaluation.entropy.float()
    value = evaluation.value.float()
    if batch.executed is None:
        return log_prob, entropy, value
    samples, parts = batch.log_prob.shape

    def summed(tokens: Tensor) -> Tensor:
        return levels.summed(tokens.view(samples, -1), taken, parts)

    taken = batch.executed
    return (
        summed(log_prob),
        summed(entropy),
        value.view(samples, -1)[:, : batch.returns.shape[1]],
    )


def _accumulate(
    manager: FSDPModelManager, gradient: Gradient, minibatch: FlatBatch, config: PPOConfig
) -> Tensor:
    samples = len(minibatch.action)
    size = config.micro_batch_size or samples
    if size >= samples:
        with manager.before_micro_batch(manager.model, is_last_micro_batch=True):
            return gradient(minibatch, 1.0)
    total = torch.zeros(len(METRICS))
    for start, micro in zip(range(0, samples, size), minibatch.split(size), strict=True):
        share = len(micro.action) / samples
        last = start + size >= samples
        with manager.before_micro_batch(manager.model, is_last_micro_batch=last):
            total += share * gradient(micro, share).to(total.device)
    return total


def _kl_exceeded(manager: FSDPModelManager, metrics: list[Tensor], target: float | None) -> bool:
    if target is None:
        return False
    kl = torch.stack(metrics)[:, METRICS.index("approx_kl")].mean()
    everywhere = ranks.all_gather(manager, kl)
    return torch.stack(everywhere).mean().item() > target


def _summary(
    manager: FSDPModelManager, totals: _Totals, lrs: list[float], skipped: int
) -> dict[str, float]:
    updates = len(totals.metrics)
    if skipped == updates:
        raise TrainingDiverged(
            f"all {updates} updates of this iteration had a gradient norm that is not finite "
            f"(last: {totals.grad_norms[-1]}): nothing was learnt. Lower the learning rate, or "
            "look for NaN in observations and rewards; the last checkpoint is from before"
        )
    means = torch.stack(totals.metrics).mean(0).tolist()
    finite = [norm for norm in totals.grad_norms if np.isfinite(norm)]
    return dict(zip(METRICS, means, strict=True)) | {
        "grad_norm": float(np.mean(finite)),
        "lr": lrs[0],
        "updates": float(updates),
        "skipped_updates": float(skipped),
    }
