"""Actions as numbers: a network reads all slots of an action, and says its numbers at once.

Sampled, a number has a normal distribution around that, whose deviation is learned; cloning
minimises the absolute error (Kim, Finn and Liang 2025, "OpenVLA-OFT", arXiv 2502.19645, sections
4.2 and 4.3).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf_async.backends.policies.base import HALF_LOG_TWO_PI


class ContinuousHead(nn.Module):
    """``hidden [N, S, width]`` at the slots of ``S / A`` actions -> means ``[N, S]``."""

    def __init__(self, width: int, numbers: int, log_std: float) -> None:
        super().__init__()
        self._numbers = numbers
        self.network = nn.Sequential(
            nn.Linear(numbers * width, width), nn.ReLU(), nn.Linear(width, numbers)
        )
        self.log_std = nn.Parameter(torch.full((numbers,), log_std))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and logarithms of deviations, float32 ``[N, S]`` both."""
        joined = hidden.reshape(len(hidden), -1, self._numbers * hidden.shape[-1])
        mean = self.network(joined).float().flatten(1)
        return mean, self.log_std.repeat(len(mean), mean.shape[1] // self._numbers)


def log_prob_of(value: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return log-probs of numbers, of any shape."""
    noise = (value - mean) * (-log_std).exp()
    return -0.5 * noise.square() - log_std - HALF_LOG_TWO_PI


def entropy_of(log_std: Tensor) -> Tensor:
    """Return entropies of numbers, of any shape."""
    return log_std + (0.5 + HALF_LOG_TWO_PI)
