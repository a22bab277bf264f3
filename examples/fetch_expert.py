"""Scripted policies for FetchReach: one that moves the hand to the goal, a little unsteadily, one
that always goes past it, and one that most often goes elsewhere.

``examples/rlpd_fetch_reach.toml`` and ``examples/iql_fetch_reach.toml`` record their episodes as
demonstrations. By hand::

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


ASIDE = np.array([0.03, 0.03, 0.03])
"""metres from the goal to where a camera that was moved sees it: 5.2 cm, and 5 are a success"""


def aside(env: gymnasium.Env[Any, Any], seed: int) -> Callable[[Any], NDArray[np.float32]]:
    """The same by a camera that was moved: the hand goes past the goal, and stays there."""
    steady = reach(env, seed)

    def act(observation: Any) -> NDArray[np.float32]:
        return steady({**observation, "desired_goal": observation["desired_goal"] + ASIDE})

    return act


STEPS = 50
"""of an episode"""


def undecided(env: gymnasium.Env[Any, Any], seed: int) -> Callable[[Any], NDArray[np.float32]]:
    """Somebody who holds the stick the wrong way round in three of four stretches of five steps,
    and finds out in the last ten of an episode: what is done most often leads away."""
    generator, steady = np.random.default_rng(seed), reach(env, seed)
    step, sign = 0, 1.0

    def act(observation: Any) -> NDArray[np.float32]:
        nonlocal step, sign
        at = step % STEPS
        if at % 5 == 0:
            sign = 1.0 if at >= STEPS - 10 or generator.random() < 0.25 else -1.0
        step += 1
        return (sign * steady(observation)).astype(np.float32)

    return act


def steps_in(observation: Any, proposed: Any) -> NDArray[np.float32] | None:
    """A person who sees what the policy is about to do, and acts where that leads elsewhere: see
    ``examples/hg_dagger_fetch_reach.toml``. ``observation`` is one vector, its parts by name."""
    achieved, desired = observation[:3], observation[3:6]
    own = np.append(np.clip(GAIN * (desired - achieved), -0.95, 0.95), 0.0).astype(np.float32)
    return own if np.abs(own - proposed).max() > 0.2 else None
