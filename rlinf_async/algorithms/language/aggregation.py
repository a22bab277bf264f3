"""From the losses of tokens to the loss of a global batch.

::

    loss = sum over trained tokens of (weight x token loss)  /  sum over samples of units

Weights and units are known sample by sample; only the denominator needs the whole global batch. So
gradients are summed undivided, and divided once at the end: the result does not depend on how
samples are divided into micro-batches or among ranks.

================================  ====================  ==========================================
``token-mean``                    weight 1, units R     every token counts alike (DAPO, Yu et al.
                                                        2025, equation 8)
``sequence-mean-token-mean``      weight 1/R, units 1   every sample counts alike (GRPO, Shao et al.
                                                        2024, equation 3)
``sequence-mean-token-sum``       weight 1, units 1     no bias by length (Dr. GRPO, Liu et al.
                                                        2025, up to its constant)
================================  ====================  ==========================================

``R`` is the number of a sample's trained tokens; a sample without any counts nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from rlinf_async.algorithms.language.config import Aggregation


class Share(NamedTuple):
    """The weight of one sample."""

    weight: float
    """of each of its trained tokens"""
    units: float
    """its part of the denominator"""


def share_of(trained_tokens: int, aggregation: Aggregation) -> Share:
    """Return the share of a sample of so many trained tokens."""
    if trained_tokens == 0:
        return Share(0.0, 0.0)
    if aggregation == "token-mean":
        return Share(1.0, float(trained_tokens))
    if aggregation == "sequence-mean-token-mean":
        return Share(1.0 / trained_tokens, 1.0)
    return Share(1.0, 1.0)
