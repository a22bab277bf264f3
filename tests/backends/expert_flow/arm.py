"""A table with two cameras: an environment for the tiny SmolVLA, and a script that solves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Text

from tests.backends.expert_flow.kit import NUMBERS, SIZES, STATE


class Arm(gymnasium.Env[Any, Any]):
    """Reach zero, as the state says. ``sizes``: of other cameras; ``state``, ``numbers``: sizes of
    states and actions; ``names``: what the cameras are called."""

    metadata = {"render_modes": []}  # noqa: RUF012 Gymnasium's name

    def __init__(
        self,
        sizes: dict[str, Any] | None = None,
        state: int = STATE,
        numbers: int = NUMBERS,
        *,
        text: bool = True,
    ) -> None:
        self._sizes = {name: tuple(size) for name, size in (sizes or SIZES).items()}
        self._text = text
        parts: dict[str, Any] = {
            name: Box(0, 255, (*size, 3), np.uint8) for name, size in self._sizes.items()
        }
        parts["state"] = Box(-10.0, 10.0, (state,), np.float32)
        if text:
            parts["task"] = Text(12)
        self.observation_space = Dict(parts)
        self.action_space = Box(-1.0, 1.0, (numbers,), np.float32)
        self.place = np.zeros(state, np.float32)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1.0, 1.0, len(self.place)).astype(np.float32)
        self._steps = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        moved = 0.3 * np.asarray(action, np.float32)
        self.place[: len(moved)] += moved
        self._steps += 1
        distance = float(np.abs(self.place[: len(moved)]).sum())
        done = distance < 0.3
        return self._seen(), -distance, done, self._steps >= 7, {"success": done}

    def _seen(self) -> dict[str, Any]:
        level = np.clip(128 + 100 * self.place[0], 0, 255)
        seen: dict[str, Any] = {
            name: np.full((*size, 3), level, np.uint8) for name, size in self._sizes.items()
        }
        seen["state"] = self.place.copy()
        if self._text:
            seen["task"] = "reach"
        return seen


def expert(env: Any, seed: int) -> Callable[[Any], Any]:
    """Goes to zero."""

    def act(seen: Any) -> Any:
        size = env.action_space.shape[0]
        return np.clip(-seen["state"][:size] / 0.3, -1.0, 1.0).astype(np.float32)

    return act
