"""Numbers of actions in [-1, 1], and the bins that stand for them (Kim et al. 2024, section 3.2).

OpenVLA's bins lie between quantiles of the training data; these are equal parts of [-1, 1], which
the environment stretches to its bounds: no data is needed, and decoding is exact.
"""

from __future__ import annotations

from torch import Tensor


def encode(action: Tensor, bins: int) -> Tensor:
    """Return the bin, int64, of each number; numbers outside [-1, 1] are in the outer ones."""
    return ((action + 1.0) * (0.5 * bins)).floor().long().clamp(0, bins - 1)


def decode(token: Tensor, bins: int) -> Tensor:
    """Return the middle of each bin, float32. `encode` gives the same bin for it."""
    return (token.float() + 0.5) * (2.0 / bins) - 1.0
