"""Advantages without a critic: a sample is compared with the others of its group.

``r_i`` is the reward of sample ``i`` of a group of ``G`` scored samples, less the KL of its tokens.
Every token of a sample gets the sample's advantage, except with ``reinforce++``. In a group of one
the advantage is 0, as nothing is left to compare with (verl: the raw reward).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlinf_async.algorithms.language.advantages import (
    ScoredTokens,
    TokenAdvantages,
    register_group_advantage,
)
from rlinf_async.algorithms.language.config import LanguageAdvantageConfig
from rlinf_async.messages.embodied import Floats

Rewards = NDArray[np.float64]

EPS = 1e-6


@register_group_advantage("grpo")
def grpo(group: Sequence[ScoredTokens], config: LanguageAdvantageConfig) -> list[TokenAdvantages]:
    """``(r_i - mean(r)) / (std(r) + 1e-6)``, std unbiased (Shao et al. 2024, equation 4.1.1).

    Without ``divide_by_std`` only the mean is subtracted (Liu et al. 2025, Dr. GRPO). Equal rewards
    give exactly 0.
    """
    centred = _centred(_totals(group))
    if config.divide_by_std and len(group) > 1:
        centred = centred / (np.linalg.norm(centred) / np.sqrt(len(group) - 1) + EPS)
    return _spread(group, centred)


@register_group_advantage("rloo")
def rloo(group: Sequence[ScoredTokens], config: LanguageAdvantageConfig) -> list[TokenAdvantages]:
    """``r_i`` less the mean of the *others* (Ahmadian et al. 2024, equation 7).

    A sample without others has no baseline and gets 0.
    """
    size = len(group)
    centred = _centred(_totals(group))
    return _spread(group, centred * (size / (size - 1)) if size > 1 else centred)


@register_group_advantage("reinforce++_baseline")
def reinforce_plus_plus_baseline(
    group: Sequence[ScoredTokens], config: LanguageAdvantageConfig
) -> list[TokenAdvantages]:
    """``r_i - mean(r)``, whitened over the global batch afterwards (Hu et al. 2025, 3.2)."""
    return _spread(group, _centred(_totals(group)))


@register_group_advantage("reinforce++")
def reinforce_plus_plus(
    group: Sequence[ScoredTokens], config: LanguageAdvantageConfig
) -> list[TokenAdvantages]:
    """Reward to go ``sum_{s >= t} gamma^(s - t) r_s``, no baseline; whitened over the global batch
    afterwards (Hu et al. 2025, equations 7 and 8)."""
    answers = []
    for one in group:
        to_go = _to_go(one.reward, config.gamma)
        answers.append(TokenAdvantages(to_go, to_go))
    return answers


def _totals(group: Sequence[ScoredTokens]) -> Rewards:
    return np.array([one.total for one in group], np.float64)


def _centred(rewards: Rewards) -> Rewards:
    # The mean of equal numbers may differ from them in the last bit; their advantage is 0.
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    centred: Rewards = rewards - rewards.mean()
    return centred


def _spread(group: Sequence[ScoredTokens], advantages: Rewards) -> list[TokenAdvantages]:
    answers = []
    for one, advantage in zip(group, advantages, strict=True):
        tokens = np.full(len(one.reward), advantage, np.float32)
        answers.append(TokenAdvantages(tokens, tokens))
    return answers


def _to_go(reward: Floats, gamma: float) -> Floats:
    if gamma == 1.0:
        return np.cumsum(reward[::-1], dtype=np.float64)[::-1].astype(np.float32)
    to_go = np.zeros(len(reward), np.float32)
    running = 0.0
    for at in range(len(reward) - 1, -1, -1):
        running = float(reward[at]) + gamma * running
        to_go[at] = running
    return to_go
