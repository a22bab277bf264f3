"""Generalised advantage estimation over the tokens of a response."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlinf_async.algorithms.advantages import AdvantageInputs
from rlinf_async.algorithms.config import AdvantageConfig
from rlinf_async.algorithms.gae import gae
from rlinf_async.algorithms.language.advantages import (
    ScoredTokens,
    TokenAdvantages,
    register_group_advantage,
)
from rlinf_async.algorithms.language.config import LanguageAdvantageConfig


@register_group_advantage("gae")
def token_gae(
    group: Sequence[ScoredTokens], config: LanguageAdvantageConfig
) -> list[TokenAdvantages]:
    """Return `algorithms.gae` over tokens: a token is a step, and the last one is terminal.

    Schulman et al. 2016, equation 16. Raises `ValueError` if a sample has no values.
    """
    if any(one.value is None for one in group):
        raise ValueError(
            "advantage 'gae' needs values, and a sample has none: run a critic, or choose an "
            "advantage without one (grpo, rloo, reinforce++)"
        )
    lengths = [len(one.reward) for one in group]
    # Samples are columns; elements below the last token of a shorter one are never read.
    shape = (max(lengths), len(group))
    reward, value = np.zeros(shape, np.float32), np.zeros((shape[0] + 1, shape[1]), np.float32)
    ended = np.zeros(shape, np.bool_)
    for column, (one, length) in enumerate(zip(group, lengths, strict=True)):
        reward[:length, column] = one.reward
        value[:length, column] = one.value
        ended[length - 1 : length, column] = True
    nothing = np.zeros(shape, np.float32)
    inputs = AdvantageInputs(reward, value, ended, np.zeros_like(ended), nothing)
    found = gae(inputs, AdvantageConfig(gamma=config.gamma, gae_lambda=config.gae_lambda))
    return [
        TokenAdvantages(found.advantage[:length, column], found.returns[:length, column])
        for column, length in enumerate(lengths)
    ]
