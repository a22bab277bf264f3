"""Estimates of KL(policy, reference) from one sampled token (Schulman 2020, "Approximating KL
divergence")."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_async.algorithms.language.config import KLEstimator


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, estimator: KLEstimator) -> Tensor:
    """Return the estimate of each token, shaped like ``log_prob``; ``d = log_prob - ref_log_prob``.

    - ``k1``: ``d``. Unbiased; negative for half of the tokens or more.
    - ``k2``: ``d^2 / 2``. Biased; its gradient is that of the true KL when the token was sampled
      from the policy.
    - ``k3``: ``exp(-d) - 1 + d``. Unbiased and never negative.
    """
    difference = log_prob - ref_log_prob
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return torch.expm1(-difference) + difference
