"""A group of environments that are stepped together.

An episode that ends is followed by the next in the same step: the row of ``observation`` is then of
the new episode, and the last observation of one that was cut is kept for the bootstrap. Stepping
and resetting are two calls, because a reset may take a thousand times as long::

    needs_reset --reset()--> ready --step(answer)--> ready, or needs_reset where episodes ended

All calls block, and must not overlap: `rlinf_async.workers.pace` runs them one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from rlinf_async.messages.embodied import Bools, Choice, Floats, Ints
from rlinf_async.messages.spaces import Seen, all_finite, numbers_of
from rlinf_async.workers.env.actions import ActionReader
from rlinf_async.workers.env.slot import Episode, Slot


class Outcome(msgspec.Struct):
    """The result of one step of ``E`` environments, of which ``K`` had their episode cut.

    ``E`` are all of a stage, or those that got ready.
    """

    reward: Floats
    """``[E]``"""
    terminated: Bools
    """``[E]``: episodes that ended; none of them is in ``truncated``"""
    truncated: Bools
    """``[E]``: episodes that were cut"""
    final_observation: Seen | None
    """``[K, D]``: last observations of the cut episodes, in the order of their environments"""
    episodes: list[Episode]
    """of the environments whose episode ended, in their order"""
    action_reward: Floats | None = None
    """``[E, k]``: the reward of each action of a chunk, 0 where it was not executed"""
    executed: Bools | None = None
    """``[E, k]``: which actions of a chunk were executed"""
    valid: Bools | None = None
    """``[E]``: False where the step only began an episode; None: all are samples"""
    rows: Ints | None = None
    """``[E]``: which environments of the stage these are, in ascending order; None: all"""


class EnvStage(Protocol):
    """The environments of a stage: single ones (`Stage`), those of one simulator
    (`BatchedStage`), or those of which some get ready before others (`AsyncStage`)."""

    observation: Seen
    """``[E, D]``: present observations; a step makes a new array, the old stays as it is"""
    rows: Ints | None
    """``[E]``: their numbers, where some get ready before others; None: they step together"""

    @property
    def in_flight(self) -> int:
        """How many have a step under way."""
        ...

    @property
    def needs_reset(self) -> bool:
        """Whether `reset` is due before the next step."""
        ...

    def reset(self) -> None:
        """Begin an episode where one has ended, once no step is under way."""
        ...

    def step(self, answer: Choice | None, rows: Ints | None = None) -> Outcome:
        """Take one step with actions ``[E, A]`` (or int64 ``[E]``): in every environment, or begin
        it in those of ``rows`` and return the steps that have ended."""
        ...

    def close(self) -> None:
        """Close the environments."""
        ...


class GroupedStage(EnvStage, Protocol):
    """A stage that can begin its episodes in groups."""

    def begin_groups(self, seeds: Sequence[int]) -> None:
        """Begin an episode in every environment, from one seed for each group."""
        ...


class Stage:
    """``E`` environments; ``observation`` is an array for theirs, not filled."""

    rows: Ints | None = None
    in_flight = 0

    def __init__(
        self,
        slots: Sequence[Slot],
        observation: Seen,
        actions: ActionReader,
        *,
        action_chunk: int = 1,
        group_size: int = 1,
    ) -> None:
        self._action_chunk, self._group_size = action_chunk, group_size
        self._slots = slots
        self._actions = actions
        self._to_reset = list(range(len(slots)))
        self._fresh = True
        self.observation = observation
        """``[E, D]``: present observations; a step makes a new array, the old stays as it is"""

    @property
    def needs_reset(self) -> bool:
        """Whether `reset` is due before the next step."""
        return bool(self._to_reset)

    def reset(self) -> None:
        """Begin an episode where one has ended; the first ones use the environments' seeds.

        Raises:
            EnvFailed: an environment raised, or showed NaN or infinity.
        """
        for index in self._to_reset:
            slot = self._slots[index]
            slot.reset(self.observation[index], slot.seed if self._fresh else None)
        self._check(self.observation)
        self._to_reset, self._fresh = [], False

    def begin_groups(self, seeds: Sequence[int]) -> None:
        """Begin an episode in every environment, from one seed for each group.

        Raises: as `reset`.
        """
        for index, slot in enumerate(self._slots):
            slot.reset(self.observation[index], seeds[index // self._group_size])
        self._check(self.observation)
        self._to_reset, self._fresh = [], False

    def step(self, answer: Choice | None, rows: Ints | None = None) -> Outcome:
        """Take one step in every environment, with actions ``[E, A]`` (or int64 ``[E]``).

        Raises:
            EnvFailed: an environment raised, or returned NaN or infinity.
            EnvError: the actions do not fit.
        """
        actions = self._actions.read(answer, len(self._slots))
        shown = np.empty_like(self.observation)
        stepped = [
            slot.step(action, row)
            for slot, action, row in zip(self._slots, actions, shown, strict=True)
        ]
        self._check(shown)
        reward, terminated, truncated, episodes = zip(*stepped, strict=True)
        ended = np.array(terminated, np.bool_)
        cut = np.array(truncated, np.bool_) & ~ended
        self.observation = shown
        self._to_reset = [index for index, done in enumerate(episodes) if done is not None]
        return Outcome(
            np.array(reward, np.float32),
            ended,
            cut,
            shown[cut] if self._to_reset and cut.any() else None,
            [episode for episode in episodes if episode is not None],
            *self._chunks(),
        )

    def _chunks(self) -> tuple[Floats | None, Bools | None]:
        """Rewards ``[E, k]`` of the actions of a chunk, and which were executed."""
        if self._action_chunk == 1:
            return None, None
        return chunk_rewards([slot.action_rewards for slot in self._slots], self._action_chunk)

    def close(self) -> None:
        """Close the environments."""
        for slot in self._slots:
            slot.close()

    def _check(self, observation: Seen) -> None:
        numbers = numbers_of(observation)
        if numbers is None or all_finite(numbers):
            return
        for slot, row in zip(self._slots, observation, strict=True):
            slot.check(row)


def chunk_rewards(each: Sequence[Sequence[float]], size: int) -> tuple[Floats, Bools]:
    """Rewards ``[E, k]`` of the actions of a chunk, and which of its ``size`` were executed."""
    reward = np.zeros((len(each), size), np.float32)
    executed = np.zeros(reward.shape, np.bool_)
    for row, rewards in enumerate(each):
        reward[row, : len(rewards)] = rewards
        executed[row, : len(rewards)] = True
    return reward, executed
