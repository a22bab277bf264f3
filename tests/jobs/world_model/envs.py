"""A dot on a line, which a world model learns in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np


class Line(gymnasium.Env[Any, Any]):
    """A dot between -1 and 1; it pays how much nearer the dot comes to 1, and ends there.

    Args:
        choices: whether actions are left, stay and right, or a number.
        seen: whether there is a picture of 8 x 8 pixels and a text beside the position.
        shows: numbers that it shows.
    """

    def __init__(self, choices: bool = False, seen: bool = False, shows: int = 1) -> None:
        self._choices, self._seen, self._shows = choices, seen, shows
        state = gymnasium.spaces.Box(-1.0, 1.0, (shows,), np.float32)
        both = gymnasium.spaces.Dict(
            {
                "picture": gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8),
                "state": state,
                "word": gymnasium.spaces.Text(4),
            }
        )
        self.observation_space = both if seen else state
        box = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3) if choices else box

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._at, self._steps = float(self.np_random.uniform(-1.0, 0.0)), 0
        self._word = "left" if self._at < -0.5 else "near"
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        moved = (int(action) - 1) if self._choices else float(np.asarray(action).item()) / 2.0
        before, self._at = self._at, float(np.clip(self._at + 0.3 * moved, -1.0, 1.0))
        self._steps += 1
        there = self._at > 0.8
        cut = not there and self._steps >= 8
        return self._shown(), self._at - before, there, cut, {"is_success": there}

    def _shown(self) -> Any:
        state = np.full(self._shows, self._at, np.float32)
        if not self._seen:
            return state
        picture = np.zeros((8, 8, 3), np.uint8)
        picture[:, : int(4 * (self._at + 1.0))] = 200
        return {"picture": picture, "state": state, "word": self._word}


def wander(env: gymnasium.Env[Any, Any], seed: int) -> Callable[[Any], Any]:
    """A script that does anything, and more often goes to the right."""
    generator = np.random.default_rng(seed)

    def act(observation: Any) -> Any:
        if isinstance(env.action_space, gymnasium.spaces.Discrete):
            return generator.choice(3, p=[0.2, 0.2, 0.6])
        return generator.uniform(-1.0, 2.0, 1).astype(np.float32)

    return act
