"""Environments that go wrong, each in its own way."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np


class Walk(gymnasium.Env[Any, Any]):
    """A random walk of 10 steps, without a renderer.

    Args:
        fails_at: the step of its life at which it raises.
        reset_seconds: how long its first reset takes.
        shows: added to what it shows.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, fails_at: int = 0, reset_seconds: float = 0.0, shows: float = 0.0) -> None:
        self.fails_at, self.reset_seconds, self.shows = fails_at, reset_seconds, shows
        self.at = self.life = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        time.sleep(self.reset_seconds)
        self.at, self.reset_seconds = 0, 0.0
        return self.np_random.random(2) + self.shows, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        self.life += 1
        if self.life == self.fails_at:
            raise ArithmeticError("the simulator exploded")
        return self.np_random.random(2) + self.shows, 1.0, False, self.at == 10, {}


def broken() -> Walk:
    """An entry point that raises."""
    raise RuntimeError("no licence for the simulator")


def rooms() -> gymnasium.Env[Any, Any]:
    """An environment whose observations are text."""
    env = Walk()
    env.observation_space = gymnasium.spaces.Text(5)  # type: ignore[assignment]
    return env
