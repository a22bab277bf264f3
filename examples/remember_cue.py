"""A task that needs a memory: what to do at the end is shown at the beginning only.

``examples/remember_cue.toml`` trains a recurrent policy in it.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray


class RememberCue(gymnasium.Env[NDArray[np.float32], np.int64]):
    """One of two cues is shown in the first step; the last action has to be its number.

    Args:
        length: steps of an episode.
    """

    observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)
    """the cue, one-hot, in the first step; and the share of the episode that is over"""
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.cue, self.step_number = int(self.np_random.integers(2)), 0
        return self._shown(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        over = self.step_number == self.length
        right = over and int(action) == self.cue
        return self._shown(), float(right), over, False, {"is_success": right} if over else {}

    def _shown(self) -> NDArray[np.float32]:
        shown = np.zeros(3, np.float32)
        if self.step_number == 0:
            shown[self.cue] = 1.0
        shown[2] = self.step_number / self.length
        return shown
