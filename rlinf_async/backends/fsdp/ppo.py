"""PPO's inner loop: epochs x shuffled minibatches over one flat batch.

It waits for no other worker: the batch is complete, and only gradients cross ranks. A minibatch is
one optimizer step; micro-batches split it to save memory, and do not change the numbers.

A step of an environment that takes chunks executes ``k`` actions, each of some tokens. A policy may
answer with a log-prob for each token, ``[N, k * tokens]``, and with a value for each action,
``[N, k]``, or each token. Two settings say what the loss is made of::

    advantage.level      chunk    rewards are summed; one value, one advantage for a chunk
                         action   each action has its own
                         token    each token has its own; the reward of an action is that of its
                                  last token
    ppo.log_prob_level   chunk    one ratio for all tokens of a chunk
                         action   one for those of each action
                         token    one for each

Actions that were not executed, because the episode had ended, count nowhere: log-probs of their
tokens are left out of sums, and their rows have weight 0. Weights have mean 1 over all ranks, so
that the mean of weighted losses is the masked mean, whatever share of the batch a rank or a
micro-batch holds.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_async.algorithms.advantages import AdvantageInputs, Advantages, compute_advantages
from rlinf_async.algorithms.config import AdvantageConfig, LossConfig
from rlinf_async.algorithms.losses import LossInputs, loss_functions
from rlinf_async.backends.base import TrainingDiverged
from rlinf_async.backends.fsdp import ranks
from rlinf_async.backends.fsdp.config import PPOConfig
from rlinf_async.backends.fsdp.fused_ppo import METRICS, FlatBatch, FusedPpo, Gradient
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.policies.base import Evaluation
from rlinf_async.messages.embodied import Bools, Floats

ORDER: Final = ("token", "action", "chunk")
"""levels of log-probs and advantages, from fine to coarse"""


class Steps(NamedTuple):
    """One iteration of ``E`` environments; ``k`` is 1 where actions come one by one."""

    reward: Floats
    """``[T, E, k]``"""
    executed: Bools
    """``[T, E, k]``"""
    value: Floats
    """``[T + 1, E, V]``: ``V`` is 1, or ``k``, or ``tokens``"""
    tokens: int
    """log-probs of a sample: 1, or the tokens of ``k`` actions"""
    terminated: Bools
    truncated: Bools
    final_value: Floats
    """all three ``[T, E]``"""


def masked_after_done(executed: Bools, ended: Bools) -> Bools:
    """Leave out all steps after the first that ended an episode, ``[T, E, k]``."""
    before: NDArray[np.int64] = np.cumsum(ended, axis=0) - ended
    kept: Bools = executed & (before == 0)[..., None]
    return kept


def chunk_advantages(steps: Steps, config: AdvantageConfig) -> Advantages:
    """Return advantages and returns ``[T, E, 1]``, or ``[T, E, k]`` at the level ``action``, or as
    many as there are values at the level ``token``."""
    if config.level == "chunk":
        rows = AdvantageInputs(
            reward=(steps.reward * steps.executed).sum(-1, dtype=np.float32),
            value=steps.value[..., 0],
            terminated=steps.terminated,
            truncated=steps.truncated,
            final_value=steps.final_value,
            valid=np.asarray(steps.executed.any(-1)),
        )
        made = compute_advantages(rows, config)
        return Advantages(made.advantage[..., None], made.returns[..., None])
    return _action_advantages(steps if config.level == "action" else by_token(steps), config)


def by_token(steps: Steps) -> Steps:
    """Return steps whose actions are the tokens of the given ones: as many as there are values.

    Raises:
        ValueError: the policy gives no value for each token.
    """
    *shape, actions = steps.reward.shape
    values = steps.value.shape[-1]
    tokens, rest = divmod(steps.tokens, actions)
    if rest or values != steps.tokens:
        raise ValueError(
            f"actor.advantage.level is 'token', and the policy gives {values} values for the "
            f"{steps.tokens} tokens of {actions} actions: it must give one for each token (its "
            "setting token_values says so), or set 'action' or 'chunk'"
        )
    reward = np.zeros((*shape, actions * tokens), np.float32)
    reward[..., tokens - 1 :: tokens] = steps.reward
    return steps._replace(reward=reward, executed=steps.executed.repeat(tokens, axis=-1))


def _action_advantages(steps: Steps, config: AdvantageConfig) -> Advantages:
    length, envs, size = steps.reward.shape
    last = np.maximum(
        steps.executed.sum(-1) - 1, 0
    )  # the action at which an episode may have ended
    at_end = np.arange(size) == last[..., None]
    rows = AdvantageInputs(
        reward=_by_action(steps.reward * steps.executed),
        value=np.concatenate([_by_action(steps.value[:-1]), steps.value[-1:, :, 0]]),
        terminated=_by_action(at_end & steps.terminated[..., None]),
        truncated=_by_action(at_end & steps.truncated[..., None]),
        final_value=_by_action(at_end * steps.final_value[..., None]),
        valid=_by_action(steps.executed),
    )
    made = compute_advantages(rows, config)
    return Advantages(*(one.reshape(length, size, envs).swapaxes(1, 2) for one in made))


def _by_action(array: NDArray[Any]) -> NDArray[Any]:
    """``[T, E, k]`` -> ``[T * k, E]``, in the order of time."""
    length, envs, size = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(length * size, envs)


def parts_of(level: str, tokens: int, actions: int) -> int:
    """Return how many log-probs a sample of ``tokens`` tokens has at the level."""
    return {"token": tokens, "action": actions, "chunk": 1}[level]


def summed(tokens: Tensor, executed: Tensor, parts: int) -> Tensor:
    """Return ``[N, parts]``: sums of ``[N, tokens]`` over the executed ones of each part."""
    return torch.where(executed, tokens, 0.0).view(len(tokens), parts, -1).sum(-1)


def spread(action: Tensor, columns: int) -> Tensor:
    """Return ``[N, columns]`` of a number for each action (or one for all), ``[N, k]``."""
    return action.repeat_interleave(columns // action.shape[1], dim=1)


def weights(member: ranks.Rank, mask: Tensor) -> Tensor:
    """Return weights for ``mask``, 0 where it is False, with mean 1 over all ranks. Collective."""
    counts = torch.tensor([float(mask.sum()), float(mask.numel())], dtype=torch.float64)
    valid, total = torch.stack(ranks.all_gather(member, counts)).sum(0).tolist()
    scale: float = total / max(valid, 1.0)
    return mask.to(torch.float32) * scale


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
        self._loss = loss_functions.named(config.name)

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

    def of_level(tokens: Tensor) -> Tensor:
        return summed(tokens.view(samples, -1), taken, parts)

    taken = batch.executed
    return (
        of_level(log_prob),
        of_level(entropy),
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
