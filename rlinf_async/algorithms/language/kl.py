"""Estimates of KL(policy, reference) from one sampled token (Schulman 2020, "Approximating KL
divergence")."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_async.algorithms.language.config import K3_LIMIT, LOG_RATIO_LIMIT, KLEstimator


def kl_estimate(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    estimator: KLEstimator,
    k3_limit: float = K3_LIMIT,
) -> Tensor:
    """Return the estimate of each token, shaped like ``log_prob``; ``d = log_prob - ref_log_prob``.

    - ``k1``: ``d``. Unbiased; negative for half of the tokens or more.
    - ``k2``: ``d^2 / 2``. Biased; its gradient is that of the true KL when the token was sampled
      from the policy.
    - ``k3``: ``exp(-d) - 1 + d``, at most ``k3_limit``. Never negative; unbiased where the limit is
      not reached. As in verl, ``d`` is clamped to plus or minus 20 first, so that value and
      gradient are finite.
    """
    difference = log_prob - ref_log_prob
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(-difference) + difference).clamp(max=k3_limit)
