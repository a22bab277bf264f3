"""One environment: its seed, its episode so far, and errors that name both."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rlinf_async.config.errors import raised
from rlinf_async.messages.spaces import numbers_of
from rlinf_async.messages.success import success_of
from rlinf_async.rewards.judging import MAX_REWARD
from rlinf_async.workers.env.errors import EnvFailed, is_interrupt
from rlinf_async.workers.foreign_calls import CLOSE, NOT_NOTED, RESET, STEP, Call, in_words

if TYPE_CHECKING:
    import gymnasium

ACTION_REWARDS = "action_rewards"
"""in the info of a step that executed several actions: the reward of each"""

Write = Callable[[Any, Any], None]
"""``(observation, row)``: fills the row, or raises"""


class Episode(msgspec.Struct, frozen=True):
    """An episode that ended."""

    episode_return: float
    """undiscounted"""
    length: int
    """steps"""
    success: bool | None
    """as the environment says (`success_of`); None where it does not"""


def reward_problem(reward: float) -> str:
    """Why a reward cannot be trained on, as the end of a sentence; empty where it can."""
    if abs(reward) <= MAX_REWARD:
        return ""
    beyond = f", beyond {MAX_REWARD:g}, which training cannot compute with: scale it"
    return f"the reward {reward:g}{beyond if math.isfinite(reward) else ''}"


class Slot:
    """Steps one environment, writing its observations into rows that it is given."""

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        write: Write,
        *,
        label: str,
        seed: int,
        call: Call = NOT_NOTED,
    ) -> None:
        """``call`` is where its calls are noted."""
        self.env = env
        self._call = call
        self.label = label
        """``"FetchReachDense-v4[3]"``: stands in every error"""
        self.seed = seed
        self.steps = 0
        """steps since the environment was made"""
        self._write = write
        self.action_rewards: list[float] = []
        """of the actions that the last step executed, where actions come in chunks"""
        self._return = 0.0
        self.length = 0
        """steps of the episode so far"""

    def reset(self, row: Any, seed: int | None = None) -> None:
        """Begin an episode; with a seed, seed the environment's random numbers too.

        Raises:
            EnvFailed: the environment raised, or its observation has the wrong shape.
        """
        if seed is not None:
            self.seed = seed
        self._return, self.length = 0.0, 0
        self._call.begin(RESET, self.seed, self.steps, 0)
        try:
            observation, _ = self.env.reset(seed=seed)
            self._write(observation, row)
        except BaseException as error:
            raise self.failed("reset", error) from error
        finally:
            self._call.end()

    def step(self, action: Any, row: Any) -> tuple[float, bool, bool, Episode | None]:
        """Take one step: reward, terminated, truncated, and the episode if it ended with this step.

        Raises:
            EnvFailed: the environment raised, or its reward is none to train on.
        """
        self.steps += 1
        self.length += 1
        self._call.begin(STEP, self.seed, self.steps, self.length)
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
            self._write(observation, row)
            gained, going_on = float(reward), not (terminated or truncated)
            self.action_rewards = info.get(ACTION_REWARDS, [])
        except BaseException as error:
            raise self.failed("step", error) from error
        finally:
            self._call.end()
        if problem := reward_problem(gained):
            raise EnvFailed(f"{self._where('step')} returned {problem}")
        self.length += max(len(self.action_rewards) - 1, 0)
        self._return += gained
        if going_on:
            return gained, False, False, None
        ended = Episode(self._return, self.length, success_of(info))
        return gained, bool(terminated), bool(truncated), ended

    def close(self) -> None:
        """Close the environment.

        Raises:
            EnvFailed: the environment raised.
        """
        self._call.begin(CLOSE, self.seed, self.steps, self.length)
        try:
            self.env.close()
        except BaseException as error:
            raise self.failed("close", error) from error
        finally:
            self._call.end()

    def check(self, row: Any) -> None:
        """Raise `EnvFailed` if the observation has NaN or infinity."""
        numbers = numbers_of(row)
        if numbers is None:
            return
        bad = np.flatnonzero(~np.isfinite(numbers))
        if bad.size:
            raise EnvFailed(
                f"{self._where('step')} returned an observation with {bad.size} values that are "
                f"NaN or infinite as float32, the first at index {bad[0]} of {numbers.size}"
            )

    def failed(self, doing: str, error: BaseException) -> EnvFailed:
        """The error for something that the environment raised; a Ctrl-C is raised as it is."""
        if is_interrupt(error):
            raise error
        return EnvFailed(f"{self._where(doing)} raised {raised(error)}")

    def _where(self, doing: str) -> str:
        where = in_words(f"env {self.label}", doing, self.seed, self.steps, self.length)
        return f"{where},"
