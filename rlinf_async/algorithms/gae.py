"""Generalised advantage estimation (Schulman et al. 2016, equations 11 to 16)."""

from __future__ import annotations

import numpy as np

from rlinf_async.algorithms.advantages import AdvantageInputs, Advantages, register_advantage
from rlinf_async.algorithms.config import AdvantageConfig


@register_advantage("gae")
def gae(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Return exponentially weighted temporal-difference errors, and returns = advantage + value.

    A terminated step bootstraps with 0, a truncated one with ``final_value`` (the episode would
    have gone on: Pardo et al. 2018); the sum over later steps stops at both. A step that is both
    counts as terminated.
    """
    terminated = inputs.terminated
    ended = terminated | inputs.truncated
    next_value = np.where(inputs.truncated, inputs.final_value, inputs.value[1:])
    next_value = np.where(terminated, np.float32(0.0), next_value)
    delta = inputs.reward + np.float32(config.gamma) * next_value - inputs.value[:-1]
    decay = np.where(ended, np.float32(0.0), np.float32(config.gamma * config.gae_lambda))
    advantage = np.empty_like(delta, dtype=np.float32)
    running = np.zeros(delta.shape[1:], dtype=np.float32)
    for step in range(len(delta) - 1, -1, -1):
        running = delta[step] + decay[step] * running
        advantage[step] = running
    return Advantages(advantage, advantage + inputs.value[:-1])
