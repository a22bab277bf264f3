"""Weights for tokens that were sampled by another policy than the denominator of the ratio.

The ratio's denominator is the *proximal* policy; with ``proximal = "step"`` the weights that the
iteration begins with. Tokens were sampled by the *behaviour* policy: an engine with its own
kernels, or older weights. Each token's loss is multiplied by ``w = exp(proximal - behaviour)``, a
constant to the gradient.

- ``truncated``: ``min(w, cap)`` (truncated importance sampling, Ionides 2008; for engine and
  trainer that disagree: Yao et al. 2025).
- ``decoupled``: ``w``, and 0 where it is above the cap (decoupled PPO, Hilton et al. 2022,
  equation 5; leaving tokens out: Fu et al. 2025, AReaL).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlinf_async.algorithms.language.config import LanguageLossConfig


class OffPolicyWeights(NamedTuple):
    """Both ``[N]``."""

    weight: Tensor
    capped: Tensor
    """1 where the cap was reached, else 0"""


def off_policy_weights(
    proximal_log_prob: Tensor, behaviour_log_prob: Tensor, config: LanguageLossConfig
) -> OffPolicyWeights | None:
    """Return the weights of ``[N]`` tokens, without gradients; None for ``off_policy = "none"``."""
    if config.off_policy == "none":
        return None
    with torch.no_grad():
        weight = (proximal_log_prob - behaviour_log_prob).exp()
        capped = weight > config.off_policy_cap
        left = config.off_policy_cap if config.off_policy == "truncated" else 0.0
        return OffPolicyWeights(weight.masked_fill(capped, left), capped.to(weight.dtype))
