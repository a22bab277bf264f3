"""A scripted policy for FetchReach: it moves the hand to the goal, a little unsteadily.

``examples/rlpd_fetch_reach.toml`` records its episodes as demonstrations. By hand::

    rlinf-async demonstrations examples/rlpd_fetch_reach.toml \
        --policy examples/fetch_expert.py:reach --episodes 20 --out demonstrations/fetch_reach
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

GAIN = 10.0
"""an action of 1 moves the hand by some 3 cm"""


def reach(env: gymnasium.Env[Any, Any], seed: int) -> Callable[[Any], NDArray[np.float32]]:
    """Straight to the goal, with a hand that trembles; the gripper stays as it is."""
    generator = np.random.default_rng(seed)

    def act(observation: Any) -> NDArray[np.float32]:
        towards = GAIN * (observation["desired_goal"] - observation["achieved_goal"])
        hand = np.clip(towards + generator.normal(0.0, 0.2, 3), -1.0, 1.0)
        return np.append(hand, 0.0).astype(np.float32)

    return act
