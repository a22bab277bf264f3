"""Rewards, and success, that a function of the user's own says: ``[env.reward]``.

::

    policy --action--> environment --Steps--> function --reward, success--> returns, training,
                                                                           evaluations, video

The environment is wrapped where it is made, below chunks and real time: whoever steps it, in
whatever process, gets the reward of the function. Of the environment's own reward nothing is left
but what the function takes over.

Invariant: each step is labelled once, with the observation that the policy acted on and the one
that followed; an episode that began in between is never seen as what followed the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rlinf_async.config.registry import Registry, raised
from rlinf_async.messages.converting import ObservationWriter, array_of
from rlinf_async.messages.embodied import SUCCESS, Bools, Floats
from rlinf_async.messages.spaces import ObservationArray, ObservationSpec
from rlinf_async.workers.env.config import (
    Autoreset,
    EnvRewardConfig,
    LabelError,
    is_interrupt,
)
from rlinf_async.workers.env.many import FINAL, BatchedEnv, at, batch_of, one_each
from rlinf_async.workers.env.stage import wrong_reward


class Steps(NamedTuple):
    """``N`` steps of environments, one each: 1 of an environment that is stepped alone, as many as
    are in a simulator of many."""

    observation: ObservationArray
    """``[N, D]``, or structured ``[N]`` with images and texts: what the policy acted on"""
    action: Any
    """``[N, ...]``, as the environment takes it; of a Dict or Tuple a dict or tuple of these"""
    next_observation: ObservationArray
    """as ``observation``: what followed, of an episode that ended its last"""
    reward: Floats
    """``[N]``: the environment's own"""
    terminated: Bools
    """``[N]``"""
    truncated: Bools
    """``[N]``"""


RewardFunction = Callable[[Steps], Any]
"""``function(steps)`` returns rewards ``[N]``, or ``(rewards, successes)``, both ``[N]``"""

reward_functions: Registry[RewardFunction] = Registry("reward function", called_with=("steps",))
"""functions that ``env.reward.function`` names"""


class Labels(NamedTuple):
    """What a function says of ``N`` steps."""

    reward: NDArray[np.float64]
    """``[N]``"""
    success: Bools | None
    """``[N]``; None: it says nothing, and the environment's word holds"""


class Labeller:
    """Calls the function that the settings name, and checks what it says.

    Raises:
        ConfigError: there is no such function, or no classifier of what is ``shown``.
    """

    def __init__(self, config: EnvRewardConfig, shown: ObservationSpec) -> None:
        self.ends = config.ends
        self._function: RewardFunction
        if config.classifier:
            from rlinf_async.backends.success.classifier import classifier_for

            self._name = f"the classifier {config.classifier!r}"
            self._function = classifier_for(config.classifier, config.threshold, shown)
            return
        self._name = f"the reward function {config.function!r}"
        self._function = reward_functions.check(config.function, ("reward", "function"))

    def __call__(self, steps: Steps) -> Labels:
        """Return the labels of steps. Raises: `LabelError`."""
        try:
            said = self._function(steps)
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise LabelError(f"{self._name} raised {raised(error)}") from error
        return self._checked(said, len(steps.reward))

    def _checked(self, said: Any, count: int) -> Labels:
        rewards, success = said if isinstance(said, tuple) and len(said) == 2 else (said, None)
        paid = self._numbers(rewards, "rewards", count)
        if wrong := wrong_reward(paid):
            raise LabelError(
                f"{self._name} returned {wrong.problem}, of step {wrong.place} of {count}"
            )
        if success is None:
            return Labels(paid, None)
        solved = self._numbers(success, "successes", count)
        if not np.isin(solved, (0.0, 1.0)).all():
            raise LabelError(
                f"{self._name} returned successes {solved.tolist()}; each is True or False"
            )
        return Labels(paid, solved.astype(np.bool_))

    def _numbers(self, said: Any, what: str, count: int) -> NDArray[np.float64]:
        found = _array(said)
        if found is None or found.shape != (count,) or found.dtype.kind not in "biuf":
            shape = type(said).__name__ if found is None else f"{found.dtype} {list(found.shape)}"
            raise LabelError(
                f"{self._name} returned {what} as {shape}; they are [{count}], a number for each "
                "step"
            )
        return found.astype(np.float64)


def _array(said: Any) -> NDArray[Any] | None:
    try:
        found: NDArray[Any] = array_of(said)
    except (TypeError, ValueError):  # a ragged list
        return None
    return found


class LabelledEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment, stepped alone, whose rewards a `Labeller` says."""

    def __init__(self, env: gymnasium.Env[Any, Any], config: EnvRewardConfig, name: str) -> None:
        """``name`` is the environment's. Raises: as `Labeller`."""
        super().__init__(env)
        self._writer = ObservationWriter(env.observation_space, name)
        self._label = Labeller(config, self._writer.spec)
        self._seen: ObservationArray = self._writer.spec.empty(1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        shown, info = self.env.reset(seed=seed, options=options)
        self._seen = self._written(shown)
        return shown, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        shown, reward, terminated, truncated, info = self.env.step(action)
        after = self._written(shown)
        said = self._label(
            Steps(
                self._seen,
                batch_of([action]),
                after,
                np.array([reward], np.float32),
                np.array([terminated], np.bool_),
                np.array([truncated], np.bool_),
            )
        )
        self._seen = after
        ended = bool(terminated)
        if said.success is not None:
            info = {**info, SUCCESS[0]: bool(said.success[0])}
            ended = ended or (self._label.ends and bool(said.success[0]))
        return shown, float(said.reward[0]), ended, bool(truncated), info

    def _written(self, shown: Any) -> ObservationArray:
        rows = self._writer.spec.empty(1)
        self._writer.write(shown, rows[0])
        return rows


class LabelledSimulator:
    """A simulator of ``E`` environments, as `BatchedEnv`, whose rewards a `Labeller` says.

    Steps that only begin an episode (``autoreset``) are not labelled: they are no samples.
    """

    def __init__(
        self, env: BatchedEnv, config: EnvRewardConfig, name: str, autoreset: Autoreset
    ) -> None:
        """``name`` is the simulator's; ``autoreset`` how it begins episodes. Raises: as
        `Labeller`."""
        self.env = env
        self.num_envs = env.num_envs
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self._autoreset = autoreset
        self._writer = ObservationWriter(env.single_observation_space, name)
        self._label = Labeller(config, self._writer.spec)
        self._seen: ObservationArray = self._writer.spec.empty(self.num_envs)
        self._begins = np.zeros(self.num_envs, np.bool_)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin all episodes, or those of a mask."""
        shown, info = self.env.reset(seed=seed, options=options)
        self._seen = self._written(shown)
        self._begins = np.zeros_like(self._begins)
        return shown, info

    def step(self, actions: Any, /) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step in every environment."""
        shown, rewards, terminations, truncations, info = self.env.step(actions)
        after, count = self._written(shown), self.num_envs
        paid = one_each(rewards, "rewards", count).astype(np.float64)
        terminated = one_each(terminations, "terminations", count).astype(np.bool_)
        truncated = one_each(truncations, "truncations", count).astype(np.bool_)
        ended = terminated | truncated
        if (rows := np.flatnonzero(~self._begins)).size:
            said = self._label(
                Steps(
                    self._seen[rows],
                    _rows_of(actions, rows),
                    self._last(after, ended, info)[rows],
                    paid[rows].astype(np.float32),
                    terminated[rows],
                    truncated[rows],
                )
            )
            paid[rows] = said.reward
            if said.success is not None:
                info = self._told(info, rows, said.success)
        self._seen = after
        if self._autoreset == "next_step":
            self._begins = ended
        return shown, paid, terminations, truncations, info

    def close(self) -> None:
        """Close the simulator."""
        self.env.close()

    def _written(self, shown: Any) -> ObservationArray:
        rows = self._writer.spec.empty(self.num_envs)
        self._writer.write_all(shown, rows)
        return rows

    def _last(
        self, after: ObservationArray, ended: Bools, info: Mapping[str, Any]
    ) -> ObservationArray:
        """What followed each step: of episodes that ended in it, their last observations."""
        if self._autoreset != "same_step" or not ended.any():
            return after
        last: ObservationArray = after.copy()
        name = next((one for one in FINAL if one in info), "")
        none = np.full(self.num_envs, name != "")
        there = one_each(info.get(f"_{name}", none), "last observations", self.num_envs)
        if not there[ended].all():
            raise LabelError(
                "an episode ended, and a new one was begun in the same step, but info has no "
                f"{' or '.join(FINAL)} of it: rewards of one's own need the last observations of "
                "all episodes that end, of those that terminate, too"
            )
        shown = info[name]
        for place in np.flatnonzero(ended).tolist():
            self._writer.write(at(shown, place), last[place])
        return last

    def _told(self, info: Any, rows: NDArray[Any], success: Bools) -> dict[str, Any]:
        solved = np.zeros(self.num_envs, np.bool_)
        solved[rows] = success
        said = {SUCCESS[0]: solved, f"_{SUCCESS[0]}": np.ones_like(solved)}
        if self._autoreset == "same_step":  # it is the end of an episode that says
            return {**info, "final_info": said}
        return {**info, **said}


def _rows_of(actions: Any, rows: NDArray[Any]) -> Any:
    """The actions of some environments, out of a batch."""
    if isinstance(actions, dict):
        return {key: _rows_of(part, rows) for key, part in actions.items()}
    if isinstance(actions, tuple):
        return tuple(_rows_of(part, rows) for part in actions)
    return array_of(actions)[rows]
