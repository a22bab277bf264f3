"""Action chunks: a policy answers with ``k`` actions at once, which are executed one by one.

To everything outside, a chunk is one action of shape ``[k, A]``, and its reward is the sum of those
of its actions. An episode that ends within a chunk leaves the rest of it unexecuted.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlinf_async.workers.env.stage import ACTION_REWARDS


def chunks_of(single: Any, size: int) -> spaces.Box:
    """The space ``[size, A]`` of so many actions of a Box."""
    return spaces.Box(
        np.stack([single.low.reshape(-1)] * size),
        np.stack([single.high.reshape(-1)] * size),
        dtype=single.dtype,
    )


class ActionChunks(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Executes ``size`` actions of a Box in each step.

    Raises `ValueError` for an action space that is no Box.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], size: int) -> None:
        super().__init__(env)
        single = env.action_space
        if not isinstance(single, spaces.Box):
            raise ValueError(f"chunks are of continuous actions; the action space is {single}")
        self.action_space = chunks_of(single, size)
        self._single = single

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        rewards: list[float] = []
        observation: Any = None  # a chunk has at least one action
        terminated, truncated, info = False, False, dict[str, Any]()
        for one in action:
            single = one.reshape(self._single.shape)
            observation, reward, terminated, truncated, info = self.env.step(single)
            rewards.append(float(reward))
            if terminated or truncated:
                break
        info = {**info, ACTION_REWARDS: rewards}
        return observation, sum(rewards), bool(terminated), bool(truncated), info
