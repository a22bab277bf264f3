"""Soft actor-critic's losses, as functions of tensors. ``B`` is the size of a batch.

Sources: Haarnoja et al. 2018, "Soft Actor-Critic" (arXiv 1801.01290), and Haarnoja et al. 2019,
"Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905), here "2019".
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

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


def soft_target(
    reward: Tensor,
    discount: Tensor,
    next_values: Tensor,
    next_log_prob: Tensor,
    entropy_coefficient: Tensor,
) -> Tensor:
    """Return the critics' target ``[B]``: 2019, equations 2 and 3, with the smaller of two critics.

    Args:
        reward: ``[B]``, of all steps up to the next observation, discounted.
        discount: ``[B]``: gamma to the power of those steps; 0 where the episode terminated.
        next_values: ``[2, B]``: target critics at the next observation, for an action of the
            present policy.
        next_log_prob: ``[B]``, of that action.
        entropy_coefficient: a scalar, "alpha".
    """
    soft_value = next_values.amin(0) - entropy_coefficient * next_log_prob
    return reward + discount * soft_value


def critic_loss(values: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the sum over both critics of half their mean squared error: 2019, equation 5.

    ``values [2, B]``; ``weight [B]`` corrects for batches that were not drawn uniformly (Schaul et
    al. 2016, section 3.4).
    """
    error = (values - target).square()
    if weight is not None:
        error = error * weight
    return 0.5 * error.mean(1).sum()


def policy_loss(log_prob: Tensor, values: Tensor, entropy_coefficient: Tensor) -> Tensor:
    """Return ``mean(alpha log pi - min Q)``: 2019, equation 9.

    ``log_prob [B]`` and ``values [2, B]`` are of actions that the policy has sampled, with
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
