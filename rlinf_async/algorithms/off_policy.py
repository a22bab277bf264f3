"""Samples that are left out of a step, for how far the policy is from the one that drew them.

Known before the first forward pass with a gradient: a sample that is left out costs none, and the
means of the loss are over the others. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlinf_async.algorithms.config import LARGEST_LOG_RATIO, LanguageLossConfig
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample


def is_left_out(proximal: Floats, behaviour: Floats, config: LanguageLossConfig) -> bool:
    """Whether a sample is left out for the weights ``exp(proximal - behaviour)`` of its trained
    tokens ``[R]``: their geometric mean or their product is out of bounds, or the lowest is too
    low.

    Source: Liu et al. 2025, "When Speed Kills Stability"; verl's ``rollout_rs`` with ``geometric``
    and ``sequence``, and its ``rollout_token_veto_threshold``.
    """
    if not len(proximal):
        return False
    logs = proximal.astype(np.float64) - behaviour
    geometric, product = config.off_policy_geometric, config.off_policy_product
    return (
        (geometric is not None and not geometric[0] <= _exp(logs.mean()) <= geometric[1])
        or (product is not None and not product[0] <= _exp(logs.sum()) <= product[1])
        or (config.off_policy_veto is not None and _exp(logs.min()) < config.off_policy_veto)
    )


def leave_out(samples: Sequence[TrainingSample], config: LanguageLossConfig) -> int:
    """Clear the ``loss_mask`` of samples that `is_left_out`; return how many these are.

    ``prev_log_prob`` of each holds the proximal policy's log-probs.
    """
    found = 0
    for sample in samples if config.masks else ():
        mask = sample.loss_mask
        if not (sample.scored and mask.any()) or sample.prev_log_prob is None:
            continue
        if is_left_out(sample.prev_log_prob[mask], sample.log_prob[mask], config):
            sample.loss_mask = np.zeros_like(mask)
            found += 1
    return found


def _exp(log: float) -> float:
    return math.exp(min(float(log), LARGEST_LOG_RATIO))
