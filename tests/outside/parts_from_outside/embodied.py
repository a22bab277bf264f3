"""An environment, a policy and an advantage."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from rlinf_async.algorithms.advantages import AdvantageInputs, Advantages, gae
from rlinf_async.algorithms.config import AdvantageConfig
from rlinf_async.backends.policies.base import Policy, policies
from rlinf_async.backends.policies.config import PolicyConfig


class Line(gymnasium.Env[Any, Any]):
    """A point on a line that is pushed to the left or the right."""

    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, steps: int = 8) -> None:
        self.steps = steps

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.taken = self.np_random.uniform(-1.0, 1.0), 0
        return np.array([self.at], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 0.5 if action else -0.5
        self.taken += 1
        over = self.taken == self.steps
        return np.array([self.at], np.float32), -abs(self.at), False, over, {}


def small(config: PolicyConfig) -> Policy[Any]:
    """The built-in policy that fits the spaces."""
    return policies["auto"](config)


def halved(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Half of the advantage that the built-in one gives."""
    found = gae(inputs, config)
    return Advantages(found.advantage * np.float32(0.5), found.returns)
