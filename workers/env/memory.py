"""What a recurrent policy remembers of a stage's episodes: it travels with questions and answers.

A rollout worker keeps nothing between two questions, so any of them can answer the next one, and
none is missed when it dies. Invariant: an episode begins with a memory of zeros.
"""

from __future__ import annotations

import numpy as np

from rlinf_async.messages.embodied import Bools, Floats, Ints
from rlinf_async.workers.env.stage import Outcome


def after_answer(
    memory: Floats | None, answered: Floats | None, rows: Ints | None, envs: int
) -> Floats | None:
    """The memory ``[envs, H]`` of a stage, once ``rows`` of it (None: all) were answered."""
    if answered is None or rows is None:
        return answered
    after = np.zeros((envs, answered.shape[1]), np.float32) if memory is None else memory.copy()
    after[rows] = answered
    return after


def after_step(memory: Floats | None, outcome: Outcome) -> tuple[Floats | None, Floats | None]:
    """Return the memory ``[E, H]`` before the next observations, and that ``[K, H]`` of the
    episodes that were cut, before their last observations.

    A step that only began an episode, in simulators that do so, showed the policy what is left of
    the old one: that is forgotten, too.
    """
    if memory is None:
        return None, None
    begun = outcome.terminated | outcome.truncated
    if outcome.valid is not None:
        begun = begun | ~outcome.valid
    final = None
    if outcome.final_observation is not None:
        final = memory[_of(outcome, outcome.truncated)]
    if begun.any():
        memory = memory.copy()
        memory[_of(outcome, begun)] = 0.0
    return memory, final


def _of(outcome: Outcome, chosen: Bools) -> Bools | Ints:
    """The chosen ones among the environments of an outcome, as an index of the stage's."""
    return chosen if outcome.rows is None else outcome.rows[chosen]
