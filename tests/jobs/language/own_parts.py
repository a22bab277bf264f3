"""An advantage, a loss and a verifier as a user may write them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.algorithms.language.advantages import ScoredTokens, TokenAdvantages
from rlinf_async.algorithms.language.losses import TokenLossInputs
from rlinf_async.rewards import Answer


def centred(
    group: Sequence[ScoredTokens], config: LanguageAdvantageConfig
) -> list[TokenAdvantages]:
    """The reward less the mean of the group, for each token."""
    mean = sum(one.total for one in group) / len(group)
    rows = [np.full(len(one.reward), one.total - mean, np.float32) for one in group]
    return [TokenAdvantages(row, row) for row in rows]


def plain(inputs: TokenLossInputs, config: LanguageLossConfig) -> Tensor:
    """Without a ratio."""
    return -inputs.advantage * inputs.log_prob


def letters(answer: Answer) -> float:
    """More of some letters than others."""
    return sum(ord(one) % 7 for one in answer.text) / 7
