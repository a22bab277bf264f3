"""A simulator that steps many environments in one call, as a stage.

What such a simulator has to have is a part of `gymnasium.vector.VectorEnv`; arrays may be numpy's
or torch's, on any device. How an episode that ended is followed by the next differs::

    same_step   by the same step: it shows the new episode, and the last observation of the old one
                in ``info["final_obs"]``
    next_step   by the step after: that one ignores the action, and is no sample (`Outcome.valid`)
    disabled    by ``reset(options={"reset_mask": ended})``, which this stage calls

(`gymnasium.vector.AutoresetMode`). In all three an episode that was cut is bootstrapped from its
own last observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlinf_async.config.errors import raised
from rlinf_async.messages.embodied import Bools, Choice, Floats, Ints
from rlinf_async.messages.spaces import Seen, all_finite, numbers_of
from rlinf_async.messages.success import success_at
from rlinf_async.rewards.judging import MAX_REWARD
from rlinf_async.workers.env.actions import ActionReader
from rlinf_async.workers.env.config import Autoreset
from rlinf_async.workers.env.errors import EnvFailed, is_interrupt
from rlinf_async.workers.env.observations import ObservationWriter, array_of
from rlinf_async.workers.env.slot import Episode, reward_problem
from rlinf_async.workers.env.stage import Outcome
from rlinf_async.workers.foreign_calls import (
    CLOSE,
    NO_LENGTH,
    NOT_NOTED,
    RESET,
    STEP,
    STEP_AND_RESET,
    Call,
    in_words,
)

FINAL = ("final_obs", "final_observation")
"""Where ``info`` has the last observations of episodes: since, and before, Gymnasium 1.0."""


class BatchedEnv(Protocol):
    """Many environments that are stepped in one call."""

    num_envs: int
    single_observation_space: Any
    single_action_space: Any

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]: ...

    def step(self, actions: Any, /) -> tuple[Any, Any, Any, Any, dict[str, Any]]: ...

    def close(self) -> None: ...


class BatchedStage:
    """``E`` environments of one simulator; an `EnvStage`."""

    rows: Ints | None = None
    in_flight = 0

    def __init__(
        self,
        env: BatchedEnv,
        writer: ObservationWriter,
        actions: ActionReader,
        autoreset: Autoreset,
        *,
        label: str,
        seed: int,
        call: Call = NOT_NOTED,
    ) -> None:
        """``call`` is where its calls are noted."""
        self.env, self.label, self.seed = env, label, seed
        self._call = call
        self._writer, self._actions, self._autoreset = writer, actions, autoreset
        count = env.num_envs
        self.observation: Seen = writer.spec.empty(count)
        """``[E, D]``: present observations; a step makes a new array, the old stays as it is"""
        self._fresh = True
        self._ended = np.zeros(count, np.bool_)
        self._returns = np.zeros(count)
        self._lengths = np.zeros(count, np.int64)
        self.steps = 0
        """steps since the simulator was made"""

    @property
    def needs_reset(self) -> bool:
        """Whether `reset` is due before the next step."""
        return self._fresh or (self._autoreset == "disabled" and bool(self._ended.any()))

    def reset(self) -> None:
        """Begin all episodes, or those that ended where the simulator does not begin them itself.

        Raises:
            EnvFailed: the simulator raised, or showed NaN or infinity.
        """
        self._call.begin(RESET, self.seed, self.steps)
        try:
            if self._fresh:
                seen, _ = self.env.reset(seed=self.seed)
            else:
                seen, _ = self.env.reset(options={"reset_mask": self._ended.copy()})
            self.observation = self._written(seen)
        except BaseException as error:
            raise self._failed("reset", error) from error
        finally:
            self._call.end()
        self._check(self.observation, "reset")
        self._fresh = False
        self._ended = np.zeros_like(self._ended)

    def step(self, answer: Choice | None, rows: Ints | None = None) -> Outcome:
        """Take one step in every environment, with actions ``[E, A]`` (or int64 ``[E]``).

        Raises:
            EnvFailed: the simulator raised, or returned NaN, infinity or arrays of another shape.
            EnvError: the actions do not fit.
        """
        actions = batch_of(self._actions.read(answer, self.env.num_envs))
        begins = self._ended if self._autoreset == "next_step" else None
        self.steps += 1
        self._call.begin(self._stepping, self.seed, self.steps)
        try:
            seen, rewards, terminations, truncations, info = self.env.step(actions)
            shown = self._written(seen)
            paid = self._each(rewards, "rewards").astype(np.float64)
            terminated = self._each(terminations, "terminations").astype(np.bool_)
            cut = self._each(truncations, "truncations").astype(np.bool_) & ~terminated
            ended = terminated | cut
            final = self._final(shown, cut, info) if cut.any() else None
        except BaseException as error:
            raise self._failed("step", error) from error
        finally:
            self._call.end()
        self._check(shown, "step")
        good = np.abs(paid) <= MAX_REWARD
        if not good.all():
            first = int(np.argmin(good))
            problem = reward_problem(float(paid[first]))
            raise EnvFailed(f"{self._where('step')} returned {problem}, environment {first}")
        reward = paid.astype(np.float32)
        valid = None if begins is None else ~begins
        episodes = self._episodes(reward, ended, valid, info)
        self.observation, self._ended = shown, ended
        return Outcome(reward, terminated, cut, final, episodes, valid=valid)

    def close(self) -> None:
        """Close the simulator.

        Raises:
            EnvFailed: it raised.
        """
        self._call.begin(CLOSE, self.seed, self.steps)
        try:
            self.env.close()
        except BaseException as error:
            raise self._failed("close", error) from error
        finally:
            self._call.end()

    @property
    def _stepping(self) -> int:
        """What a step is: with the resets of episodes that have ended, or without."""
        if self._autoreset == "next_step":
            return STEP_AND_RESET if self._ended.any() else STEP
        return STEP_AND_RESET if self._autoreset == "same_step" else STEP

    def _written(self, seen: Any) -> Seen:
        rows = self._writer.spec.empty(self.env.num_envs)
        self._writer.write_all(seen, rows)
        return rows

    def _each(self, values: Any, name: str) -> NDArray[Any]:
        array = array_of(values)
        if array.shape != (self.env.num_envs,):
            raise ValueError(
                f"{name} of shape {array.shape}, there are {self.env.num_envs} environments"
            )
        return array

    def _final(self, shown: Seen, cut: Bools, info: Mapping[str, Any]) -> Seen:
        """The last observations of the episodes that were cut."""
        if self._autoreset != "same_step":
            last: Seen = shown[cut]
            return last
        name = last_name(info)
        rows = self._writer.spec.empty(int(cut.sum()))
        for place, index in enumerate(np.flatnonzero(cut)):
            self._writer.write(at(info[name], int(index)), rows[place])
        return rows

    def _episodes(
        self, reward: Floats, ended: Bools, valid: Bools | None, info: Mapping[str, Any]
    ) -> list[Episode]:
        self._returns += reward if valid is None else np.where(valid, reward, 0.0)
        self._lengths += 1 if valid is None else valid
        if not ended.any():
            return []
        last = info.get("final_info", info) if self._autoreset == "same_step" else info
        done = [
            Episode(
                float(self._returns[index]),
                int(self._lengths[index]),
                success_at(last, int(index)),
            )
            for index in np.flatnonzero(ended)
        ]
        self._returns[ended] = 0.0
        self._lengths[ended] = 0
        return done

    def _check(self, observation: Seen, doing: str) -> None:
        numbers = numbers_of(observation)
        if numbers is None or all_finite(numbers):
            return
        rows = np.flatnonzero(~np.isfinite(numbers).all(-1))
        if rows.size:
            raise EnvFailed(
                f"{self._where(doing)} returned observations with NaN or infinity as float32, in "
                f"environments {rows.tolist()}"
            )

    def _failed(self, doing: str, error: BaseException) -> EnvFailed:
        if is_interrupt(error):
            raise error
        return EnvFailed(f"{self._where(doing)} raised {raised(error)}")

    def _where(self, doing: str) -> str:
        where = in_words(f"simulator {self.label}", doing, self.seed, self.steps, NO_LENGTH)
        return f"{where},"


def last_name(info: Mapping[str, Any]) -> str:
    """Return where info has the last observations of episodes that were cut.

    Raises:
        ValueError: nowhere.
    """
    name = next((name for name in FINAL if name in info), None)
    if name is None:
        raise ValueError(
            f"episodes were cut, but info has none of {' and '.join(FINAL)}: with "
            "env.autoreset = 'same_step' their last observations have to stand there"
        )
    return name


def batch_of(actions: Sequence[Any] | NDArray[Any]) -> Any:
    """One action with all environments in its first dimension, as a batched space has them."""
    if isinstance(actions, np.ndarray):
        return actions
    first = actions[0]
    if isinstance(first, dict):
        return {key: batch_of([action[key] for action in actions]) for key in first}
    if isinstance(first, tuple):
        return tuple(batch_of(list(parts)) for parts in zip(*actions, strict=True))
    return np.asarray(actions)


def at(batch: Any, index: int) -> Any:
    """One environment's observation out of a batch."""
    if isinstance(batch, Mapping):
        return {key: at(part, index) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(at(part, index) for part in batch)
    one = batch[index]
    return one if isinstance(one, (str, Mapping, tuple)) else array_of(one)
