"""Messages between a replay worker and an actor that learns off-policy.

::

    BatchRequest  actor  -> replay  "draw this batch"; priorities of earlier ones
    ReplayBatch   replay -> actor   the answer
    Collected     replay -> runtime what an iteration has added, and what is in the store

Shapes are written with ``B`` transitions of an optimizer step, which ``R`` data ranks share, ``D``
observation values and ``A`` columns of actions.
A transition may span several steps: see `rlinf_async.workers.replay.transitions`.
"""

from __future__ import annotations

import msgspec

from rlinf_async.messages.embodied import Choice, Floats, Ints
from rlinf_async.messages.spaces import Seen


class BatchRequest(msgspec.Struct, kw_only=True):
    """rank 0 of the actor -> replay: draw a batch for an optimizer step of all ranks."""

    iteration: int
    number: int
    """of the batch in its iteration, from 0"""
    index: Ints | None = None
    """``[K]``: transitions of earlier batches whose priorities have changed"""
    priority: Floats | None = None
    """``[K]``: absolute temporal-difference errors"""


class ReplayBatch(msgspec.Struct, kw_only=True):
    """replay -> each data rank of the actor: its share of the transitions of an optimizer step."""

    iteration: int
    number: int
    index: Ints
    """``[B]``: numbers of the transitions, in the order in which the store has got them; the
    shares of all ranks, one after the other"""
    weight: Floats
    """``[B / R]``: importance-sampling weights, at most 1; all 1 where sampling is uniform"""
    observation: Seen
    """``[B / R, D]``"""
    action: Choice
    """``[B / R, A]``"""
    reward: Floats
    """``[B / R]``: discounted sum over the steps of the transition"""
    next_observation: Seen
    """``[B / R, D]``"""
    discount: Floats
    """``[B / R]``: of the next observation's value; 0 where the episode terminated"""
    version: Ints
    """``[B / R]``: version of the weights that acted"""


class Collected(msgspec.Struct, kw_only=True):
    """replay -> runtime: an iteration's trajectories are in the store."""

    iteration: int
    env_steps: int
    """environment steps of the iteration"""
    size: int
    """transitions in the store"""
    age_mean: float
    """versions since the stored transitions were collected, as a mean"""
    age_max: int
    lag_mean: float
    """versions between the weights that acted in the iteration and those it is trained with"""
    lag_max: int
    duplicates: int
    """trajectories left out since the last report because they had come before"""
    episode_return: list[float] = []
    episode_length: list[int] = []
    episode_success: list[bool | None] = []
