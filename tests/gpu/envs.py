"""A simulator of many environments on the device: it takes and gives its tensors."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from tests.gpu.kit import DEVICE

LENGTH = 10
"""steps of an episode"""


class Points:
    """Points that actions push; they are to stay near the origin. Episodes are cut.

    Args:
        num_envs: points.
        device: of everything that it shows; the tests' own when left out.
    """

    def __init__(self, num_envs: int, device: str = DEVICE) -> None:
        self.num_envs, self.device = num_envs, device
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Tensor, dict[str, Any]]:
        first = int(np.ravel(seed)[0]) if seed is not None else 0
        self._random = torch.Generator(self.device).manual_seed(first)
        self._at = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._point = self._drawn()
        return self._point, {}

    def step(self, actions: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        pushed = torch.as_tensor(np.asarray(actions), device=self.device)
        self._point = self._point + 0.1 * pushed
        self._at += 1
        reward = -self._point.square().sum(1)
        cut = self._at == LENGTH
        last = self._point
        self._point = torch.where(cut[:, None], self._drawn(), self._point)
        self._at[cut] = 0
        return self._point, reward, torch.zeros_like(cut), cut, {"final_obs": last}

    def close(self) -> None:
        """Nothing is held but tensors."""

    def _drawn(self) -> Tensor:
        return torch.rand(self.num_envs, 2, generator=self._random, device=self.device) - 0.5


def points(num_envs: int) -> Points:
    return Points(num_envs)
