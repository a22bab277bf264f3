"""Advantages by name. Shapes: ``T`` steps, ``E`` envs; arrays are float32 unless said otherwise.

An advantage function never normalises: the trainer does, over a batch or a minibatch, as
configured.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from rlinf_async.algorithms.config import AdvantageConfig
from rlinf_async.config.registry import Registry
from rlinf_async.messages.embodied import Bools, Floats


class AdvantageInputs(NamedTuple):
    """Collected steps, in the order of time."""

    reward: Floats
    """``[T, E]``"""
    value: Floats
    """``[T + 1, E]``; the last row is the bootstrap value"""
    terminated: Bools
    """``[T, E]``: the episode ended for good"""
    truncated: Bools
    """``[T, E]``: the episode was cut"""
    final_value: Floats
    """``[T, E]``: value of the last observation of a truncated episode; read at those steps only"""
    valid: Bools | None = None
    """``[T, E]``: steps that count; None: all do"""


class Advantages(NamedTuple):
    """Advantages and returns of a trajectory, both ``[T, E]``, float32."""

    advantage: Floats
    returns: Floats
    """the target of the value function"""


class AdvantageFunction(Protocol):
    """The signature of a registered advantage."""

    def __call__(self, inputs: AdvantageInputs, config: AdvantageConfig, /) -> Advantages: ...


advantage_functions: Registry[AdvantageFunction] = Registry(
    "advantage",
    group="rlinf_async.advantages",
    called_with=("inputs", "config"),
)
register_advantage = advantage_functions.register


def compute_advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Check the shapes and call the advantage named in ``config``.

    Raises `UnknownName` for an unknown advantage and `ValueError` for shapes that do not fit.
    """
    _check_shapes(inputs)
    return advantage_functions.named(config.name)(inputs, config)


def _check_shapes(inputs: AdvantageInputs) -> None:
    steps = inputs.reward.shape
    expected = {
        "value": (steps[0] + 1, *steps[1:]),
        "terminated": steps,
        "truncated": steps,
        "final_value": steps,
    }
    for field, shape in expected.items():
        found = getattr(inputs, field).shape
        if found != shape:
            raise ValueError(f"{field} has shape {found}; with reward {steps} it must be {shape}")


@register_advantage("grpo")
def grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Return (return of the episode - mean of its group) / deviation of its group, at every step.

    Advantages are relative to a group of episodes from one initial state (Shao et al. 2024, 4.1).
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


@register_advantage("gae")
def gae(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Return exponentially weighted temporal-difference errors, and returns = advantage + value
    (generalised advantage estimation: Schulman et al. 2016, equations 11 to 16).

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
