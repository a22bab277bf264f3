"""Losses by name, and the formulas of PPO and soft actor-critic. ``B`` is the size of a batch.

Sources: Haarnoja et al. 2018, "Soft Actor-Critic" (arXiv 1801.01290), and Haarnoja et al. 2019,
"Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905), here "2019".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rlinf_async.algorithms.config import OF_CORRECTION, LanguageLossConfig, LossConfig
from rlinf_async.config.registry import Registry


class LossInputs(NamedTuple):
    """One micro-batch: outputs of the current policy, and of earlier ones. All ``[B]``."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor
    old_log_prob: Tensor
    """of the proximal policy: see `LossConfig.proximal`"""
    old_value: Tensor
    """of the same"""
    advantage: Tensor
    """normalised, and weighted where an older policy acted: see `LossConfig.off_policy`"""
    returns: Tensor
    weight: Tensor | None = None
    """weight of each log-prob in means: 0 where it is masked; None: all count the same. ``value``
    and ``returns`` may then have another shape than log-probs"""
    value_weight: Tensor | None = None
    """weight of each value in means"""


class LossOutput(NamedTuple):
    """A scalar to differentiate, and scalars as metrics."""

    loss: Tensor
    metrics: Mapping[str, Tensor | float]
    """by column of ``metrics.csv``, which has their mean over an iteration's updates and ranks; of
    ``approx_kl`` an epoch's mean is held below ``ppo.target_kl``. The same names in every call"""


class LossFunction(Protocol):
    """The signature of a registered loss."""

    def __call__(self, inputs: LossInputs, config: LossConfig, /) -> LossOutput: ...


loss_functions: Registry[LossFunction] = Registry(
    "loss", group="rlinf_async.losses", called_with=("inputs", "config")
)
register_loss = loss_functions.register


def metrics_of(loss: LossFunction, config: LossConfig) -> tuple[str, ...]:
    """Names of the metrics that a loss returns, as for a small batch; raises what it raises."""
    numbers = torch.linspace(-0.1, 0.1, 4)
    new, old = numbers.clone().requires_grad_(), numbers.flip(0)
    inputs = LossInputs(
        log_prob=new,
        entropy=new + 1.0,
        value=new * 2.0,
        old_log_prob=old,
        old_value=old,
        advantage=numbers,
        returns=old + 1.0,
    )
    return tuple(loss(inputs, config).metrics)


class PolicyLoss(NamedTuple):
    """Scalars."""

    loss: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


def clipped_policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    config: LossConfig,
    weight: Tensor | None = None,
) -> PolicyLoss:
    """Return PPO's clipped surrogate (Schulman et al. 2017, equation 7), negated; inputs ``[B]``.

    With ``dual_clip`` it is also bounded from the other side for negative advantages (Ye et al.
    2020, equation 5).
    """
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    loss, clipped = clipped_surrogate(ratio, advantage, config)
    with torch.no_grad():
        clip_fraction = weighted_mean((ratio != clipped).to(ratio.dtype), weight)
        kl = approximate_kl(log_ratio, weight)
    return PolicyLoss(weighted_mean(loss, weight), kl, clip_fraction)


class Surrogate(NamedTuple):
    """The surrogate objective, for each ratio."""

    loss: Tensor
    clipped: Tensor
    """the ratio within its limits"""


def clipped_surrogate(
    ratio: Tensor, advantage: Tensor, config: LossConfig | LanguageLossConfig
) -> Surrogate:
    """Return PPO's clipped surrogate of each element, negated, as `clipped_policy_loss` has it."""
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    if config.dual_clip is not None:
        bounded = torch.minimum(loss, -config.dual_clip * advantage)
        loss = torch.where(advantage < 0, bounded, loss)
    return Surrogate(loss, clipped)


def weighted_mean(numbers: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean of ``weight * numbers``; the weights' own mean is 1 over a whole batch."""
    return numbers.mean() if weight is None else (numbers * weight).mean()


def approximate_kl(log_ratio: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the estimate ``mean(ratio - 1 - log ratio)`` of KL(old, new); ``log_ratio [B]``.

    It is never negative and unbiased under the old policy (Schulman 2020, "Approximating KL
    divergence", k3).
    """
    return weighted_mean(torch.expm1(log_ratio) - log_ratio, weight)


def value_loss(
    value: Tensor,
    old_value: Tensor,
    returns: Tensor,
    clip: float | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Return half the mean squared error of ``value``; inputs ``[B]``.

    With ``clip`` it is the larger of that and the error of the value clipped to within ``clip`` of
    the old one, element by element (Schulman et al. 2016; Engstrom et al. 2020, section 3).
    """
    return 0.5 * weighted_mean(squared_error(value, old_value, returns, clip), weight)


def squared_error(
    value: Tensor, old_value: Tensor, returns: Tensor, clip: float | None = None
) -> Tensor:
    """Return the error of each value that `value_loss` takes the mean of."""
    error = (value - returns).square()
    if clip is not None:
        near = old_value + (value - old_value).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return error


class OffPolicyWeights(NamedTuple):
    """Weights of what another policy has sampled, of any shape."""

    weight: Tensor
    capped: Tensor
    """1 where a limit was passed, else 0"""

    @property
    def columns(self) -> dict[str, Tensor]:
        """By name of the metric, what its mean is taken of."""
        found = (self.weight, (self.weight - 1.0).abs(), self.capped)
        return dict(zip(OF_CORRECTION, found, strict=True))


def truncated_weights(log_ratio: Tensor, cap: float) -> OffPolicyWeights:
    """Return ``min(exp(log_ratio), cap)``: truncated importance sampling (Ionides 2008)."""
    weight = log_ratio.exp()
    capped = weight > cap
    return OffPolicyWeights(weight.masked_fill(capped, cap), capped.to(weight.dtype))


@register_loss("ppo")
def ppo_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """Return the clipped policy loss + value loss - entropy bonus (Schulman et al. 2017, eq. 9)."""
    policy = clipped_policy_loss(
        inputs.log_prob, inputs.old_log_prob, inputs.advantage, config, inputs.weight
    )
    value = value_loss(
        inputs.value, inputs.old_value, inputs.returns, config.value_clip, inputs.value_weight
    )
    entropy = weighted_mean(inputs.entropy, inputs.weight)
    loss = policy.loss + config.value_coefficient * value - config.entropy_coefficient * entropy
    metrics = {
        "policy_loss": policy.loss.detach(),
        "value_loss": value.detach(),
        "entropy": entropy.detach(),
        "approx_kl": policy.approx_kl,
        "clip_fraction": policy.clip_fraction,
    }
    return LossOutput(loss, metrics)


LOG_TWO = math.log(2.0)
HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def squashed_log_prob(noise: Tensor, log_std: Tensor, unsquashed: Tensor) -> Tensor:
    """Return log-probs ``[B]`` of the actions ``tanh(unsquashed)``, ``unsquashed = mean + std *
    noise``; all inputs ``[B, A]``.

    2019, appendix C, equation 26, with ``log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u))``,
    which does not round to the logarithm of 0 where an action is near a bound.
    """
    normal = -0.5 * noise.square() - log_std - HALF_LOG_TWO_PI
    squash = 2.0 * (LOG_TWO - unsquashed - functional.softplus(-2.0 * unsquashed))
    return (normal - squash).sum(-1)


def normal_log_prob(noise: Tensor, log_std: Tensor) -> Tensor:
    """Return log-probs ``[B]`` of ``mean + std * noise``; ``noise [B, A]``."""
    return (-0.5 * noise.square() - log_std - HALF_LOG_TWO_PI).sum(-1)


def expectile_loss(value: Tensor, target: Tensor, expectile: float) -> Tensor:
    """Return the mean of ``|expectile - 1(target < value)| (target - value)^2``: Kostrikov et al.
    2021, "Offline Reinforcement Learning with Implicit Q-Learning", equation 5. Inputs ``[B]``.

    With 0.5 it is half the mean squared error; towards 1 the value becomes the largest target.
    """
    over = target - value
    share = torch.where(over < 0.0, 1.0 - expectile, expectile)
    return (share * over.square()).mean()


def advantage_weight(advantage: Tensor, inverse_temperature: float, largest: float) -> Tensor:
    """Return ``min(exp(inverse_temperature * advantage), largest)``, without gradients: the weights
    of log-probs of the data's actions (Peng et al. 2019, "Advantage-Weighted Regression"; Kostrikov
    et al. 2021, equation 7). All are 1 with an inverse temperature of 0."""
    with torch.no_grad():
        bound = math.log(largest)
        return (inverse_temperature * advantage).clamp(max=bound).exp()


def soft_target(
    reward: Tensor,
    discount: Tensor,
    next_values: Tensor,
    next_log_prob: Tensor,
    entropy_coefficient: Tensor,
) -> Tensor:
    """Return the critics' target ``[B]``: 2019, equations 2 and 3, with the least of the critics.

    Args:
        reward: ``[B]``, of all steps up to the next observation, discounted.
        discount: ``[B]``: gamma to the power of those steps; 0 where the episode terminated.
        next_values: ``[E, B]``: target critics at the next observation, for an action of the
            present policy.
        next_log_prob: ``[B]``, of that action.
        entropy_coefficient: a scalar, "alpha".
    """
    soft_value = next_values.amin(0) - entropy_coefficient * next_log_prob
    return reward + discount * soft_value


def soft_value(values: Tensor, log_probs: Tensor, entropy_coefficient: Tensor) -> Tensor:
    """Return ``sum of pi (min Q - alpha log pi)`` over the choices, ``[B]``: what `soft_target` has
    for one sample, as an expectation (Christodoulou 2019, equation 10). Less its mean is the
    policy's loss (equation 12).

    Args:
        values: ``[E, B, A]``: those of every choice.
        log_probs: ``[B, A]``.
        entropy_coefficient: a scalar, "alpha".
    """
    each = values.amin(0) - entropy_coefficient * log_probs
    return (log_probs.exp() * each).sum(-1)


def critic_loss(values: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the sum over the critics of half their mean squared error: 2019, equation 5.

    ``values [E, B]``; ``weight [B]`` corrects for batches that were not drawn uniformly (Schaul et
    al. 2016, section 3.4).
    """
    error = (values - target).square()
    if weight is not None:
        error = error * weight
    return 0.5 * error.mean(1).sum()


def policy_loss(log_prob: Tensor, values: Tensor, entropy_coefficient: Tensor) -> Tensor:
    """Return ``mean(alpha log pi - min Q)``: 2019, equation 9.

    ``log_prob [B]`` and ``values [E, B]`` are of actions that the policy has sampled, with
    gradients.
    """
    return (entropy_coefficient * log_prob - values.amin(0)).mean()


def entropy_coefficient_loss(
    log_coefficient: Tensor, log_prob: Tensor, target_entropy: float
) -> Tensor:
    """Return the loss of the logarithm of alpha: 2019, equation 18.

    As in the authors' code the gradient is that of ``log alpha`` times the difference of entropies:
    it has the sign of equation 18's, and does not vanish where alpha is small.
    """
    return -log_coefficient * (log_prob.detach().mean() + target_entropy)


@torch.no_grad()
def polyak_update(targets: Iterable[Tensor], sources: Iterable[Tensor], tau: float) -> None:
    """Move every target by the share ``tau`` towards its source: 2018, algorithm 1, last line."""
    for target, source in zip(targets, sources, strict=True):
        target.lerp_(source, tau)
