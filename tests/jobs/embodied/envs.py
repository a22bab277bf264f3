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
    """An environment whose observations are a graph."""
    env = Walk()
    env.observation_space = gymnasium.spaces.Graph(gymnasium.spaces.Box(-1, 1), None)  # type: ignore[assignment]
    return env


class Kitchen(gymnasium.Env[Any, Any]):
    """Shows a camera, an instruction and an arm; takes a push and a grip. Episodes of 5 steps."""

    observation_space = gymnasium.spaces.Dict(
        {
            "camera": gymnasium.spaces.Box(0, 255, (6, 6, 3), np.uint8),
            "instruction": gymnasium.spaces.Text(16),
            "arm": gymnasium.spaces.Box(-np.inf, np.inf, (2,)),
        }
    )
    action_space = gymnasium.spaces.Dict(
        {"push": gymnasium.spaces.Box(-1.0, 1.0, (2,)), "grip": gymnasium.spaces.Discrete(2)}
    )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.at += 1
        return self._shown(), float(action["grip"]), False, self.at == 5, {}

    def _shown(self) -> Any:
        camera = self.np_random.integers(0, 255, (6, 6, 3), np.uint8)
        return {"camera": camera, "instruction": "grip it", "arm": self.np_random.random(2)}


class OneHand(gymnasium.Env[Any, Any]):
    """Takes three numbers within bounds of their own. Episodes of 5 steps."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space: gymnasium.Space[Any] = gymnasium.spaces.Box(
        np.array([-2.0, 0.0, 0.0], np.float32), np.array([1.0, 4.0, 4.0], np.float32)
    )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.at += 1
        reward = -float(np.square(self.numbers(action) - 0.5).sum())
        return self._shown(), reward, False, self.at == 5, {}

    def numbers(self, action: Any) -> Any:
        """The numbers of an action, side by side."""
        return action

    def _shown(self) -> Any:
        return self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)


class TwoHands(OneHand):
    """The same numbers, by name."""

    action_space = gymnasium.spaces.Dict(
        {
            "left": gymnasium.spaces.Box(-2.0, 1.0, (1,)),
            "right": gymnasium.spaces.Box(0.0, 4.0, (2,)),
        }
    )

    def numbers(self, action: Any) -> Any:
        return np.concatenate([action["left"], action["right"]])
