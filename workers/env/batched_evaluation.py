"""Episodes of the deterministic policy in a simulator that steps many environments in one call.

Every environment plays the same number of episodes (or one less), one after the other, and each
counts, however long it takes: short episodes are not favoured. The simulator is seeded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlinf_async.messages.embodied import Choice, Floats
from rlinf_async.messages.spaces import Seen
from rlinf_async.workers.env.evaluation import EvaluatedEpisode
from rlinf_async.workers.env.memory import after_step
from rlinf_async.workers.env.stage import EnvStage


class BatchedEvaluation:
    """This worker's episodes of one evaluation; an `Evaluation`."""

    def __init__(self, stage: EnvStage, episodes: Sequence[int]) -> None:
        self._stage = stage
        count = len(stage.observation)
        self._waiting = [list(episodes[place::count]) for place in range(count)]
        self._oldest = np.full(count, np.iinfo(np.int64).max)
        self.memory: Floats | None = None
        """``[E, H]``: what a recurrent policy remembers of the episodes"""
        self.done: list[EvaluatedEpisode] = []

    @property
    def observation(self) -> Seen:
        """``[E, D]`` of all environments."""
        return self._stage.observation

    def begin(self) -> bool:
        """Begin episodes where the simulator does not; return whether any is left."""
        if not any(self._waiting):
            return False
        if self._stage.needs_reset:
            self._stage.reset()
        return True

    def close(self) -> None:
        """Close the simulator, which is seeded only when it is made."""
        self._stage.close()

    def step(self, answer: Choice | None, version: int) -> None:
        """Take one step in every environment."""
        self._oldest = np.minimum(self._oldest, version)
        outcome = self._stage.step(answer)
        self.memory, _ = after_step(self.memory, outcome)
        ended = np.flatnonzero(outcome.terminated | outcome.truncated)
        for place, episode in zip(ended, outcome.episodes, strict=True):
            if self._waiting[place]:
                self.done.append(
                    EvaluatedEpisode(
                        episode=self._waiting[place].pop(0),
                        episode_return=episode.episode_return,
                        length=episode.length,
                        success=episode.success,
                        version=int(self._oldest[place]),
                    )
                )
            self._oldest[place] = np.iinfo(np.int64).max
