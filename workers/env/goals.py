"""Goal environments: what they reach, what they were to reach, and what that pays.

A goal environment (`gymnasium_robotics.core.GoalEnv`) shows a Dict with ``achieved_goal`` and
``desired_goal`` beside its observation, and says by ``compute_reward(achieved_goal, desired_goal,
info)`` what a step pays whose observation shows these two; by ``compute_terminated``, where it has
that, whether the episode ends with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.config import ConfigError
from rlinf_async.config.registry import raised
from rlinf_async.messages.converting import ObservationWriter
from rlinf_async.messages.described import BoxSpace, DictSpace, MultiBinarySpace, described
from rlinf_async.messages.embodied import Bools, Floats
from rlinf_async.messages.spaces import ObservationArray, numbers_of
from rlinf_async.workers.env.config import EnvConfig, EnvFailed, is_interrupt
from rlinf_async.workers.env.make import NamedEnv, opened
from rlinf_async.workers.foreign_calls import STEP

ACHIEVED: Final = "achieved_goal"
DESIRED: Final = "desired_goal"
REWARD: Final = "compute_reward"
TERMINATED: Final = "compute_terminated"


class Goals(msgspec.Struct, frozen=True):
    """Where goals stand among the numbers of an observation, and what they are."""

    achieved: int
    """first number of the goal that is reached"""
    desired: int
    """first number of the goal that was to be reached"""
    shape: tuple[int, ...]
    dtype: str

    def achieved_in(self, seen: ObservationArray) -> Floats:
        """Return a view ``[..., G]`` of what observations have reached."""
        return self._in(seen, self.achieved)

    def desired_in(self, seen: ObservationArray) -> Floats:
        """Return a view ``[..., G]`` of what was to be reached."""
        return self._in(seen, self.desired)

    def _in(self, seen: ObservationArray, first: int) -> Floats:
        numbers = numbers_of(seen)
        assert numbers is not None
        size = int(np.prod(self.shape, dtype=np.int64))
        return numbers[..., first : first + size]


def describe_goals(config: EnvConfig) -> Goals:
    """Return where an environment shows goals, read from one that is made and closed here.

    Raises: as `rlinf_async.workers.env.make_env`, and `ConfigError` for one without goals.
    """
    with opened(config) as (env, (space, _), _):
        return _goals(env, described(getattr(env, space), config.name, "observation"), config)


def _goals(env: Any, space: Any, config: EnvConfig) -> Goals:
    def refuse(problem: str) -> ConfigError:
        setting = "entry_point" if config.entry_point else "id"
        return ConfigError(
            f"env {config.name} is no goal environment: {problem}; in hindsight goals can be "
            "exchanged only where there are some",
            path=(setting,),
        )

    parts = dict(space.parts) if isinstance(space, DictSpace) else {}
    goal, wanted = parts.get(ACHIEVED), parts.get(DESIRED)
    if goal is None or wanted is None:
        raise refuse(f"it shows no Dict with {ACHIEVED!r} and {DESIRED!r}")
    of_kinds = (BoxSpace, MultiBinarySpace)
    if not isinstance(goal, of_kinds) or not isinstance(wanted, of_kinds):
        raise refuse("its goals are no Box and no MultiBinary")
    if type(wanted) is not type(goal):
        raise refuse("its goals are a Box and a MultiBinary")
    places = [ObservationWriter(space, config.name).place_of(key) for key in (ACHIEVED, DESIRED)]
    if goal.shape != wanted.shape or None in places:
        raise refuse(f"its goals are {list(goal.shape)} and {list(wanted.shape)}, or images")
    try:
        env.get_wrapper_attr(REWARD)
    except AttributeError:
        raise refuse(f"it has no {REWARD}({ACHIEVED}, {DESIRED}, info)") from None
    achieved, desired = (one.start for one in places if one is not None)
    return Goals(achieved, desired, goal.shape, goal.dtype)


class GoalRewards:
    """Says what steps pay for other goals, by an environment that takes none.

    Raises `EnvFailed` where the environment raises, or says what is no reward.
    """

    def __init__(self, config: EnvConfig, goals: Goals) -> None:
        """Make the environment, and begin an episode; raises as `NamedEnv`."""
        # How much memory an environment may have is not said of the process that has a store.
        self._env = NamedEnv(msgspec.structs.replace(config, max_memory_mb=None))
        self._goals = goals
        self._one_by_one: set[str] = set()
        """functions that take one step at a time"""
        self._env.reset(seed=config.seed)
        self._reward = self._found(REWARD)
        try:
            self._terminated: Callable[..., Any] | None = self._found(TERMINATED)
        except AttributeError:
            self._terminated = None

    def _found(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = self._env.env.get_wrapper_attr(name)
        return function

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def rewards(self, achieved: Floats, desired: Floats) -> Floats:
        """Return what ``N`` steps pay that achieve ``[N, G]`` where ``[N, G]`` is desired."""
        return self._called(REWARD, self._reward, achieved, desired).astype(np.float32)

    def terminated(self, achieved: Floats, desired: Floats) -> Bools | None:
        """Return whether the episode ends with each of these steps; None: goals do not say."""
        if self._terminated is None:
            return None
        return self._called(TERMINATED, self._terminated, achieved, desired).astype(np.bool_)

    def _called(
        self, name: str, function: Callable[..., Any], achieved: Floats, desired: Floats
    ) -> NDArray[Any]:
        count = len(achieved)
        both = [self._as_goals(one) for one in (achieved, desired)]
        # Of as many steps as a goal has numbers, nobody knows which of both a result has.
        ambiguous = count in self._goals.shape
        self._env.call.begin(STEP)
        try:
            if name not in self._one_by_one and not ambiguous:
                at_once = _at_once(function, both, count)
                if at_once is not None:
                    return at_once
                self._one_by_one.add(name)
            said = [function(one, other, {}) for one, other in zip(*both, strict=True)]
            found = np.array([np.asarray(one, np.float64).item() for one in said])
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise EnvFailed(f"{self._env.label}, {name}() raised {raised(error)}") from error
        finally:
            self._env.call.end()
        if not np.isfinite(found).all():
            raise EnvFailed(f"{self._env.label}, {name}() returned NaN or infinity")
        return found

    def _as_goals(self, numbers: Floats) -> NDArray[Any]:
        goals = self._goals
        return numbers.astype(goals.dtype).reshape(len(numbers), *goals.shape)


def _at_once(
    function: Callable[..., Any], both: list[NDArray[Any]], count: int
) -> NDArray[Any] | None:
    """What the function says of many steps, one number each; None where it takes one at a time."""
    try:
        said = np.asarray(function(*both, {}))
    except Exception:  # it is asked again, one by one
        return None
    fits = said.shape == (count,) and said.dtype.kind in "biuf" and np.isfinite(said).all()
    return said if fits else None
