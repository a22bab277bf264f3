"""Advantages by name. Shapes: ``T`` steps, ``E`` envs; arrays are float32 unless said otherwise.

An advantage function never normalises: the trainer does, over a batch or a minibatch, as
configured.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

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
    """Both ``[T, E]``, float32."""

    advantage: Floats
    returns: Floats
    """the target of the value function"""


class AdvantageFunction(Protocol):
    """The signature of a registered advantage."""

    def __call__(self, inputs: AdvantageInputs, config: AdvantageConfig, /) -> Advantages: ...


advantage_functions: Registry[AdvantageFunction] = Registry(
    "advantage",
    built_in=("rlinf_async.algorithms.gae", "rlinf_async.algorithms.grpo"),
    group="rlinf_async.advantages",
    called_with=("inputs", "config"),
)
register_advantage = advantage_functions.register


def compute_advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Check the shapes and call the advantage named in ``config``.

    Raises `UnknownName` for an unknown advantage and `ValueError` for shapes that do not fit.
    """
    _check_shapes(inputs)
    return advantage_functions[config.name](inputs, config)


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
