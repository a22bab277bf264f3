"""Noise in the steps of an integration: a step's result then has a normal distribution.

The formulas stand in ``flow_action/policy.py``.
"""

from __future__ import annotations

import math

from torch import Tensor

from rlinf_async.backends.policies.flow_action.config import FlowConfig


class StepNoise:
    """The distribution of ``x`` after a step, of one of the kinds of ``FlowConfig.noise``."""

    def __init__(self, config: FlowConfig) -> None:
        self.learnt = config.noise == "network"
        """whether a network says how much there is"""
        self._steps, self._level = config.steps, config.noise_level
        bounds = (config.least_deviation, config.largest_deviation)
        self._log_least, self._log_largest = map(math.log, bounds)

    def after(
        self, x: Tensor, velocity: Tensor, time: Tensor, said: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return mean ``[..., C]`` and logarithm of the deviation (``[..., C]`` or ``[..., 1]``).

        Args:
            x: ``[..., C]``, before the step.
            velocity: ``[..., C]``
            time: ``[..., 1]``, of the step's begin, in [0, 1).
            said: ``[..., C]``, what the network says, any numbers; None where nothing is learnt.
        """
        if said is not None:
            share = 0.5 + 0.5 * said.float().tanh()
            log_std = self._log_least + share * (self._log_largest - self._log_least)
            return x + velocity / self._steps, log_std
        late, level = time.clamp(min=1.0 / self._steps), self._level
        drift = velocity - level**2 / (2.0 * late) * (x - time * velocity)
        variance = level**2 * (1.0 - time) / (late * self._steps)
        return x + drift / self._steps, 0.5 * variance.log()
