"""Trajectories -> transitions: n-step returns, and the right next observation of each.

A transition of step ``t`` has the rewards of up to ``n`` steps (Sutton and Barto 2018, section
7.1)::

    reward    r[t] + gamma r[t+1] + ... + gamma^(m-1) r[t+m-1]
    next      the observation after step t+m-1
    discount  gamma^m; 0 where the episode terminated at step t+m-1

``m`` is ``n``, or less where the episode ends (terminated or truncated) or the trajectory does. The
next observation of an episode that was truncated is its own last one, and its value counts: it
would have gone on (Pardo et al. 2018). Every step of a trajectory becomes one transition, whatever
comes after the trajectory, so each is in the store exactly once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlinf_async.messages.embodied import Choice, Floats, Ints, Trajectory
from rlinf_async.messages.spaces import Seen


class Transitions(NamedTuple):
    """``N`` transitions, in the order of steps, then envs."""

    observation: Seen
    """``[N, D]``"""
    action: Choice
    """``[N, A]``"""
    reward: Floats
    """``[N]``"""
    next_observation: Seen
    """``[N, D]``"""
    discount: Floats
    """``[N]``"""
    version: Ints
    """``[N]``"""


def transitions_of(trajectory: Trajectory, *, n_step: int, gamma: float) -> Transitions:
    """Return the transitions of all samples of a trajectory.

    Raises `ValueError` for a trajectory without next observations.
    """
    if trajectory.last_observation is None:
        raise ValueError(
            "a trajectory came without next observations: its ticket has to ask for transitions"
        )
    steps, envs = trajectory.reward.shape
    following = np.concatenate([trajectory.observation[1:], trajectory.last_observation[None]])
    if trajectory.final_observation is not None:
        following[trajectory.truncated] = trajectory.final_observation
    ended = trajectory.terminated | trajectory.truncated
    columns = np.arange(envs)
    last = np.broadcast_to(np.arange(steps)[:, None], (steps, envs)).copy()
    reward = trajectory.reward.astype(np.float32, copy=True)
    discount = np.full((steps, envs), gamma, np.float32)
    for _ in range(1, n_step):
        goes_on = (last + 1 < steps) & ~ended[last, columns]
        last += goes_on
        reward += np.where(goes_on, discount * trajectory.reward[last, columns], np.float32(0.0))
        discount = np.where(goes_on, discount * np.float32(gamma), discount)
    discount = np.where(trajectory.terminated[last, columns], np.float32(0.0), discount)
    version = np.broadcast_to(trajectory.version[:, None], (steps, envs))
    samples = np.ones((steps, envs), np.bool_) if trajectory.valid is None else trajectory.valid
    return Transitions(
        trajectory.observation[samples],
        trajectory.action[samples],
        reward[samples],
        following[last, columns][samples],
        discount[samples],
        version[samples],
    )
