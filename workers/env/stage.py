"""Environments that are stepped together, one at a time or as a stage.

An episode that ends is followed by the next in the same step: the row of ``observation`` is then of
the new episode, and the last observation of one that was cut is kept for the bootstrap. Stepping
and resetting are two calls, because a reset may take a thousand times as long::

    needs_reset --reset()--> ready --step(answer)--> ready, or needs_reset where episodes ended

What a recurrent policy remembers of a stage's episodes travels with questions and answers. A
rollout worker keeps nothing between two questions, so any of them can answer the next one, and
none is missed when it dies. Invariant: an episode begins with a memory of zeros.

All calls block, and must not overlap: `rlinf_async.workers.host` runs them one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.config.registry import raised
from rlinf_async.messages.converting import ActionReader
from rlinf_async.messages.embodied import (
    Bools,
    Choice,
    ControlCounts,
    Floats,
    Ints,
    Level,
    all_counts,
    success_of,
)
from rlinf_async.messages.language import MAX_REWARD
from rlinf_async.messages.spaces import ObservationArray, all_finite, numbers_of
from rlinf_async.workers.env.config import EnvFailed, is_interrupt
from rlinf_async.workers.foreign_calls import (
    CLOSE,
    NO_LENGTH,
    NOT_NOTED,
    RESET,
    STEP,
    Call,
    in_words,
)

if TYPE_CHECKING:
    import gymnasium


ACTION_REWARDS = "action_rewards"
"""key in the info of a step that executed several actions: the reward of each"""

CONTROL = "control"
"""key in the info of a step in real time: its `ControlCounts`"""

Write = Callable[[Any, Any], None]
"""``(observation, row)``: fills the row, or raises"""


class Episode(msgspec.Struct, frozen=True):
    """An episode that ended."""

    episode_return: float
    """undiscounted return of the episode"""
    length: int
    """number of steps"""
    success: bool | None
    """whether the task was solved, as the environment says (`success_of`); None where it does not
    """
    level: int = 0
    """level of the curriculum in which it began"""


def reward_problem(reward: float) -> str:
    """Return why a reward cannot be trained on, as the end of a sentence; empty where it can."""
    if abs(reward) <= MAX_REWARD:
        return ""
    beyond = f", beyond {MAX_REWARD:g}, which training cannot compute with: scale it"
    return f"the reward {reward:g}{beyond if math.isfinite(reward) else ''}"


class WrongReward(NamedTuple):
    """One of several rewards that cannot be trained on."""

    place: int
    problem: str


def wrong_reward(rewards: NDArray[np.float64]) -> WrongReward | None:
    """Return the first of ``rewards [N]`` that cannot be trained on; None: there is none."""
    good = np.abs(rewards) <= MAX_REWARD
    if good.all():
        return None
    first = int(np.argmin(good))
    return WrongReward(first, reward_problem(float(rewards[first])))


class ForeignEnv:
    """An environment, or a simulator of many, whose calls are noted and named in errors.

    Args:
        label: stands in every error, as ``"env FetchReachDense-v4[3]"``.
        seed: seed of the environment's random numbers.
        call: where its calls are noted.
        length: steps of its episode, or `NO_LENGTH` for a simulator of many.
    """

    def __init__(self, label: str, seed: int, call: Call, length: int = NO_LENGTH) -> None:
        self.label, self.seed, self.call, self.length = label, seed, call, length
        self.steps = 0
        """steps since the environment was made"""

    def during(self, what: int) -> _During:
        """Return the context in which to call ``what``, such as `STEP`.

        Leaving it by an exception raises `EnvFailed`; a Ctrl-C is raised as it is.
        """
        return _During(self, what)

    def failed(self, what: int, problem: str) -> EnvFailed:
        """Return the error for a problem with a call, named with seed and step."""
        where = in_words(self.label, what, self.seed, self.steps, self.length)
        return EnvFailed(f"{where}, {problem}")


class _During:
    """A call of an environment. No generator: it stands in every step."""

    __slots__ = ("_env", "_what")

    def __init__(self, env: ForeignEnv, what: int) -> None:
        self._env, self._what = env, what

    def __enter__(self) -> None:
        env = self._env
        env.call.begin(self._what, env.seed, env.steps, env.length)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._env.call.end()
        if error is not None and not is_interrupt(error):
            raise self._env.failed(self._what, f"raised {raised(error)}") from error


class Slot(ForeignEnv):
    """Steps one environment, writing its observations into rows that it is given."""

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        write: Write,
        *,
        label: str,
        seed: int,
        call: Call = NOT_NOTED,
        options: dict[str, Any] | None = None,
    ) -> None:
        """``label`` is ``"FetchReachDense-v4[3]"``; ``call`` is where its calls are noted;
        ``options`` are those of resets, while no level has its own."""
        super().__init__(f"env {label}", seed, call, length=0)
        self.env = env
        self.level = Level(0, options or {})
        """that in which the next episodes begin"""
        self.verdict: bool | None = None
        """what a person says of the episode, which ends with the next step; None: it goes on"""
        self._began_in = 0
        self._write = write
        self.action_rewards: list[float] = []
        """rewards of the actions that the last step executed, where actions come in chunks"""
        self.control: ControlCounts | None = None
        """what the last step counted, where it was in real time"""
        self._return = 0.0

    def reset(self, row: Any, seed: int | None = None) -> None:
        """Begin an episode; with a seed, seed the environment's random numbers too.

        Raises:
            EnvFailed: the environment raised, or its observation has the wrong shape.
        """
        if seed is not None:
            self.seed = seed
        self._return, self.length, self._began_in = 0.0, 0, self.level.number
        with self.during(RESET):
            observation, _ = self.env.reset(seed=seed, options=self.level.options or None)
            self._write(observation, row)

    def step(self, action: Any, row: Any) -> tuple[float, bool, bool, Episode | None]:
        """Take one step: reward, terminated, truncated, and the episode if it ended with this step.

        Raises:
            EnvFailed: the environment raised, or its reward is none to train on.
        """
        self.steps += 1
        self.length += 1
        with self.during(STEP):
            observation, reward, terminated, truncated, info = self.env.step(action)
            self._write(observation, row)
            gained, going_on = float(reward), not (terminated or truncated)
            self.action_rewards = info.get(ACTION_REWARDS, [])
            self.control = info.get(CONTROL)
        if problem := reward_problem(gained):
            raise self.failed(STEP, f"returned {problem}")
        if self.control is not None:
            self.length += self.control.steps - self.control.skipped - 1
        else:
            self.length += max(len(self.action_rewards) - 1, 0)
        verdict, self.verdict = self.verdict, None
        if verdict is not None:
            gained, terminated, truncated, going_on = float(verdict), True, False, False
        self._return += gained
        if going_on:
            return gained, False, False, None
        success = success_of(info) if verdict is None else verdict
        ended = Episode(self._return, self.length, success, self._began_in)
        return gained, bool(terminated), bool(truncated), ended

    def pause(self) -> None:
        """Stop its time until the next step, if it is in real time."""
        if self.control is not None:
            pause: Callable[[], None] = self.env.get_wrapper_attr("pause")
            pause()

    def close(self) -> None:
        """Close the environment.

        Raises:
            EnvFailed: the environment raised.
        """
        with self.during(CLOSE):
            self.env.close()

    def check(self, row: Any) -> None:
        """Raise `EnvFailed` if the observation has NaN or infinity."""
        numbers = numbers_of(row)
        if numbers is None:
            return
        bad = np.flatnonzero(~np.isfinite(numbers))
        if bad.size:
            raise self.failed(
                STEP,
                f"returned an observation with {bad.size} values that are NaN or infinite as "
                f"float32, the first at index {bad[0]} of {numbers.size}",
            )


class StageOutcome(msgspec.Struct):
    """The result of one step of ``E`` environments, of which ``K`` had their episode cut.

    ``E`` are all of a stage, or those that got ready.
    """

    reward: Floats
    """``[E]``"""
    terminated: Bools
    """``[E]``: episodes that ended; none of them is in ``truncated``"""
    truncated: Bools
    """``[E]``: episodes that were cut"""
    final_observation: ObservationArray | None
    """``[K, D]``: last observations of the cut episodes, in the order of their environments"""
    episodes: list[Episode]
    """episodes that ended, in the order of their environments"""
    action_reward: Floats | None = None
    """``[E, k]``: the reward of each action of a chunk, 0 where it was not executed"""
    executed: Bools | None = None
    """``[E, k]``: which actions of a chunk were executed"""
    valid: Bools | None = None
    """``[E]``: False where the step only began an episode; None: all are samples"""
    rows: Ints | None = None
    """``[E]``: which environments of the stage these are, in ascending order; None: all"""
    control: ControlCounts | None = None
    """what was counted in real time, over these environments"""
    terminal_observation: ObservationArray | None = None
    """``[J, D]``: last observations of the episodes that terminated; None: none has, or they are
    not known"""


class EnvStage(Protocol):
    """The environments of a stage: single ones (`Stage`), those of one simulator
    (`BatchedStage`), or those of which some get ready before others (`AsyncStage`)."""

    observation: ObservationArray
    """``[E, D]``: present observations; a step makes a new array, the old stays as it is"""
    rows: Ints | None
    """``[E]``: their numbers, where some get ready before others; None: they step together"""

    @property
    def in_flight(self) -> int:
        """Number of environments that have a step under way."""
        ...

    @property
    def needs_reset(self) -> bool:
        """Whether `reset` is due before the next step."""
        ...

    def reset(self) -> None:
        """Begin an episode where one has ended, once no step is under way."""
        ...

    def step(self, answer: Choice | None, rows: Ints | None = None) -> StageOutcome:
        """Take one step with actions ``[E, A]`` (or int64 ``[E]``): in every environment, or begin
        it in those of ``rows`` and return the steps that have ended."""
        ...

    def pause(self, rows: Ints | None = None) -> None:
        """Until their next step nobody answers these environments, or any: the time of those in
        real time stops."""
        ...

    def take_level(self, level: Level) -> None:
        """From now on episodes begin in this level."""
        ...

    def judge(self, env: int, *, success: bool) -> None:
        """End the episode of an environment with its next step; raises `EnvError` where a simulator
        of many ends episodes by itself."""
        ...

    def close(self) -> None:
        """Close the environments."""
        ...


class Stage:
    """``E`` environments; ``observation`` is an array for theirs, not filled."""

    rows: Ints | None = None
    in_flight = 0

    def __init__(
        self,
        slots: Sequence[Slot],
        observation: ObservationArray,
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

    def step(self, answer: Choice | None, rows: Ints | None = None) -> StageOutcome:
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
        return StageOutcome(
            np.array(reward, np.float32),
            ended,
            cut,
            shown[cut] if self._to_reset and cut.any() else None,
            [episode for episode in episodes if episode is not None],
            *self._chunks(),
            control=all_counts(slot.control for slot in self._slots),
            terminal_observation=shown[ended] if ended.any() else None,
        )

    def pause(self, rows: Ints | None = None) -> None:
        """Stop the time of environments in real time until their next step."""
        for slot in self._slots if rows is None else (self._slots[row] for row in rows.tolist()):
            slot.pause()

    def take_level(self, level: Level) -> None:
        """From now on begin episodes in this level."""
        for slot in self._slots:
            slot.level = level

    def judge(self, env: int, *, success: bool) -> None:
        """End the episode of an environment with its next step."""
        self._slots[env].verdict = success

    def _chunks(self) -> tuple[Floats | None, Bools | None]:
        """Rewards ``[E, k]`` of the actions of a chunk, and which were executed."""
        if self._action_chunk == 1:
            return None, None
        return chunk_rewards([slot.action_rewards for slot in self._slots], self._action_chunk)

    def close(self) -> None:
        """Close the environments."""
        for slot in self._slots:
            slot.close()

    def _check(self, observation: ObservationArray) -> None:
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


def after_answer(
    memory: Floats | None, answered: Floats | None, rows: Ints | None, envs: int
) -> Floats | None:
    """The memory ``[envs, H]`` of a stage, once ``rows`` of it (None: all) were answered."""
    if answered is None or rows is None:
        return answered
    after = np.zeros((envs, answered.shape[1]), np.float32) if memory is None else memory.copy()
    after[rows] = answered
    return after


def after_step(memory: Floats | None, outcome: StageOutcome) -> tuple[Floats | None, Floats | None]:
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
        final = memory[_stage_rows(outcome, outcome.truncated)]
    if begun.any():
        memory = memory.copy()
        memory[_stage_rows(outcome, begun)] = 0.0
    return memory, final


def _stage_rows(outcome: StageOutcome, chosen: Bools) -> Bools | Ints:
    """The chosen ones among the environments of an outcome, as an index of the stage's."""
    return chosen if outcome.rows is None else outcome.rows[chosen]
