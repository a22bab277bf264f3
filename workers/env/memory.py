"""What a recurrent policy remembers of a stage's episodes: it travels with questions and answers.

A rollout worker keeps nothing between two questions, so any of them can answer the next one, and
none is missed when it dies. Invariant: an episode begins with a memory of zeros.
"""

from __future__ import annotations

from rlinf_async.messages.embodied import Floats
from rlinf_async.workers.env.stage import Outcome


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
    final = memory[outcome.truncated] if outcome.final_observation is not None else None
    if begun.any():
        memory = memory.copy()
        memory[begun] = 0.0
    return memory, final
