"""An environment with slow steps, and lock-step batching of it: all wait for the slowest.

Stepping in lock-step has a thread for each environment, too: the slow steps of one batch overlap.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

SHARE = 0.1
"""of the steps that are slow"""
SECONDS = 0.05
"""of a slow step"""
LENGTH = 50
"""steps of an episode"""

Step = tuple[Any, float, bool, bool, dict[str, Any]]


class SlowSteps(gym.Env[Any, Any]):
    """Reach the origin; one step in ten takes 50 ms."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.observation_space = spaces.Box(-10.0, 10.0, (2,))
        self.action_space = spaces.Box(-1.0, 1.0, (2,))
        self._seconds = seconds
        self._steps = 0
        self._at = np.zeros(2, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        self._at = self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)
        return self._at.copy(), {}

    def step(self, action: Any) -> Step:
        self._steps += 1
        if self.np_random.random() < SHARE:
            time.sleep(self._seconds)
        self._at = np.clip(self._at + 0.1 * np.asarray(action, np.float32), -10.0, 10.0)
        reward = -float(np.linalg.norm(self._at))
        return self._at.copy(), reward, False, self._steps >= LENGTH, {}


class LockStep(gym.vector.VectorEnv[Any, Any, Any]):
    """Many of them; a step ends when the slowest has ended."""

    def __init__(self, num_envs: int, seconds: float = SECONDS) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self._envs = [SlowSteps(seconds) for _ in range(num_envs)]
        self._threads = ThreadPoolExecutor(num_envs)
        self.num_envs = num_envs
        self.single_observation_space = self._envs[0].observation_space
        self.single_action_space = self._envs[0].action_space

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        first = seed if isinstance(seed, int) else 0
        seen = [env.reset(seed=first + number)[0] for number, env in enumerate(self._envs)]
        return np.stack(seen), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        stepped = self._threads.map(lambda env, action: env.step(action), self._envs, actions)
        shown, rewards, ended, cut, _ = (list(part) for part in zip(*stepped, strict=True))
        last = np.stack(shown)
        for number in np.flatnonzero(cut):
            shown[number] = self._envs[number].reset()[0]
        info = {"final_obs": last} if any(cut) else {}
        return np.stack(shown), np.array(rewards), np.array(ended), np.array(cut), info

    def close_extras(self, **_kwargs: Any) -> None:
        self._threads.shutdown()
