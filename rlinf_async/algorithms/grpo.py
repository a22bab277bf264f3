"""Advantages relative to a group of episodes from one initial state (Shao et al. 2024, 4.1)."""

from __future__ import annotations

import numpy as np

from rlinf_async.algorithms.advantages import AdvantageInputs, Advantages, register_advantage
from rlinf_async.algorithms.config import AdvantageConfig


@register_advantage("grpo")
def grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Return (return of the episode - mean of its group) / deviation of its group, at every step.

    Columns are episodes, and ``config.group_size`` of them in a row are a group. The value function
    is not trained: returns are its own outputs. Raises `ValueError` unless there are whole groups.
    """
    length, episodes = inputs.reward.shape
    size = config.group_size
    if size < 2 or episodes % size:
        raise ValueError(
            f"advantage 'grpo' has {episodes} episodes in groups of {size}: env.group_size must be "
            "at least 2, and divide them"
        )
    valid = np.ones_like(inputs.terminated) if inputs.valid is None else inputs.valid
    groups = np.where(valid, inputs.reward, np.float32(0.0)).sum(0).reshape(-1, size)
    centered = groups - groups.mean(1, keepdims=True)
    relative = centered / (groups.std(1, keepdims=True) + np.float32(1e-6))
    advantage = np.broadcast_to(relative.reshape(1, -1), (length, episodes)).astype(np.float32)
    return Advantages(advantage, inputs.value[:-1].copy())
