"""Episodes of the deterministic policy, and how long it waits to answer.

An episode starts from its own seed, in whichever environment is free, and each one counts, however
long it takes: short episodes are not favoured. The same weights give the same result if
``reset(seed)`` clears all state of the episode before. Which episodes share a forward pass depends
on timing and on the number of workers, and can change the last bits of an action. A simulator that
steps many environments in one call is seeded once, and each of its environments plays the same
number of episodes (or one less), one after the other.

A forward pass costs nearly the same for one environment and for many, so it pays to wait for those
that will be ready soon, and not for a slow one. Which it is, nobody knows beforehand. Two rules
(`Readiness`)::

    count     wait until so many are ready; with all of a stage: lock-step
    adaptive  wait while those that are ready have waited, on average, less than an answer takes

Adaptive costs at most twice as much as the best there could be. Let an answer take ``f`` seconds,
however many environments it is for, and a step ``t``. Whatever the rule, a step and its answer
cost an environment ``t + f``. Adaptive adds the wait, whose mean over a batch is at most ``f``: so
it is when the batch is answered, and of those that got ready while another batch was answered,
none has waited longer than that answer took. So a step costs ``t + 2 f`` on average, at most twice
``t + f``. Lock-step has no such bound where one environment is slow. One alone waits at most
``f (1 + 1/2 + ... + 1/E)``: each that comes postpones the answer by less than the one before.

(For the cost of acknowledgments in TCP such a rule is known as 2-competitive: Dooly, Goldman and
Scott, "On-line analysis of the TCP acknowledgment delay problem", JACM 2001.)
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Final, Literal

import msgspec
import numpy as np

from rlinf_async.messages.converting import ActionReader
from rlinf_async.messages.embodied import Choice, ControlCounts, Floats, all_counts
from rlinf_async.messages.spaces import ObservationArray, ObservationSpec
from rlinf_async.workers.env.config import episode_seed
from rlinf_async.workers.env.stage import EnvStage, Episode, Slot, after_step

log = logging.getLogger(__name__)

LONG_EPISODE: Final = 20_000
"""steps after which an episode is warned of, and again after every doubling: it may never end"""


class EvaluatedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """One episode of an evaluation."""

    episode: int
    """number of the episode, from 0 over all env workers"""
    episode_return: float
    """undiscounted return of the episode"""
    length: int
    """number of steps"""
    success: bool | None
    """whether the task was solved; None where the environment does not report it"""
    version: int
    """version of the oldest weights that acted in it"""
    failed: bool = False
    """whether its environment's process ended in it: it has not succeeded, and counts for no return
    """
    control: ControlCounts | None = None
    """what was counted in real time; None: it was not in real time"""


def failed_episodes(episodes: Sequence[int], version: int) -> list[EvaluatedEpisode]:
    """The episodes in which an environment ended its process, which are not tried again."""
    return [
        EvaluatedEpisode(
            episode=one, episode_return=0.0, length=0, success=None, version=version, failed=True
        )
        for one in episodes
    ]


class SerialEvaluation:
    """Episodes of one evaluation on this worker, a few at a time."""

    def __init__(
        self,
        slots: Sequence[Slot],
        spec: ObservationSpec,
        actions: ActionReader,
        episodes: Iterator[int],
        seed: int,
    ) -> None:
        self._idle = list(slots)
        self._waiting = episodes
        self._actions = actions
        self._seed = seed
        self._spec = spec
        self._running: list[tuple[Slot, int, int | None]] = []
        self._rows: list[ObservationArray] = []
        self._warn_at = LONG_EPISODE
        self._control: dict[int, ControlCounts | None] = {}
        """what was counted in real time, by episode"""
        self.memory: Floats | None = None
        """``[E, H]``: what a recurrent policy remembers of the running episodes"""
        self.done: list[EvaluatedEpisode] = []

    @property
    def observation(self) -> ObservationArray:
        """``[E, D]`` of the running episodes, which become fewer towards the end."""
        return np.stack(self._rows)

    def begin(self) -> bool:
        """Begin episodes in free environments; return whether any run."""
        while self._idle and (episode := next(self._waiting, None)) is not None:
            slot = self._idle.pop()
            row = self._spec.empty()
            slot.reset(row, episode_seed(self._seed, episode))
            slot.check(row)
            self._rows.append(row)
            self._running.append((slot, episode, None))
        if self.memory is not None:
            new = len(self._running) - len(self.memory)
            self.memory = np.pad(self.memory, ((0, new), (0, 0)))  # of zeros: they begin
        return bool(self._running)

    def _warn(self, slot: Slot, episode: int) -> None:
        self._warn_at *= 2
        log.warning(
            "episode %d of the evaluation, in %s, has not ended after %d steps: an environment has "
            "to terminate or truncate its episodes, or the evaluation never ends; wrap it in "
            "gymnasium.wrappers.TimeLimit, or register it with max_episode_steps",
            episode,
            slot.label,
            slot.length,
        )

    def close(self) -> None:
        """Do nothing: the environments are kept for the next evaluation."""

    def step(self, answer: Choice | None, version: int) -> None:
        """Take one step in every running episode."""
        actions = self._actions.read(answer, len(self._running))
        running, self._running, self._rows = self._running, [], []
        go_on: list[int] = []
        for place, ((slot, episode, oldest), action) in enumerate(
            zip(running, actions, strict=True)
        ):
            row = self._spec.empty()
            _, _, _, ended = slot.step(action, row)
            slot.check(row)
            counts = all_counts((self._control.get(episode), slot.control))
            self._control[episode] = counts
            acted = version if oldest is None else min(version, oldest)
            if ended is None:
                if slot.length >= self._warn_at:
                    self._warn(slot, episode)
                self._running.append((slot, episode, acted))
                self._rows.append(row)
                go_on.append(place)
            else:
                self._idle.append(slot)
                self.done.append(_evaluated(episode, ended, acted, self._control.pop(episode)))
        if self.memory is not None:
            self.memory = self.memory[go_on]


def _evaluated(
    number: int, ended: Episode, version: int, control: ControlCounts | None
) -> EvaluatedEpisode:
    return EvaluatedEpisode(
        episode=number,
        episode_return=ended.episode_return,
        length=ended.length,
        success=ended.success,
        version=version,
        control=control,
    )


ANSWERS: Final = 15
"""answers over whose median time is taken: one that waited for weights does not count"""


class Readiness:
    """The rule of one stage."""

    def __init__(self, ready: int | Literal["adaptive"]) -> None:
        self._count = None if ready == "adaptive" else ready
        self._answers: deque[float] = deque(maxlen=ANSWERS)
        self._seconds = 0.0

    def answered(self, seconds: float) -> None:
        """Count the time from a batch of observations to its actions."""
        if self._count is None:
            self._answers.append(seconds)
            self._seconds = median(self._answers)

    def wait_until(self, ready_at: Sequence[float], in_flight: int) -> float:
        """When those that got ready at these times are answered, unless others come before.

        ``inf``: others have to come. A time that has passed: now. ``in_flight`` environments are
        not ready yet.
        """
        if not in_flight:
            return -math.inf
        if self._count is not None:
            return math.inf if len(ready_at) < self._count else -math.inf
        return fmean(ready_at) + self._seconds if ready_at else math.inf


class BatchedEvaluation:
    """Episodes of one evaluation on this worker, in a stage's environments: many at a time."""

    def __init__(self, stage: EnvStage, episodes: Sequence[int]) -> None:
        self._stage = stage
        count = len(stage.observation)
        self._waiting = [list(episodes[place::count]) for place in range(count)]
        self._oldest = np.full(count, np.iinfo(np.int64).max)
        self.memory: Floats | None = None
        """``[E, H]``: what a recurrent policy remembers of the episodes"""
        self.done: list[EvaluatedEpisode] = []

    @property
    def observation(self) -> ObservationArray:
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
