"""What an environment returns is looked at before anything starts."""

from __future__ import annotations

from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from rlinf_async.config import ConfigError
from rlinf_async.workers.env import EnvConfig, EnvError, describe_env
from tests.workers.env.toy import Counting

HERE = "tests.workers.env.test_probing"


class Returning(Counting):
    """Its reset or step returns something else."""

    def __init__(self, doing: str, what: str) -> None:
        super().__init__()
        self.doing, self.what = doing, what

    def reset(self, **options: Any) -> Any:
        returned = super().reset(**options)
        return self._other(*returned) if self.doing == "reset" else returned

    def step(self, action: Any) -> Any:
        returned = super().step(action)
        return self._other(*returned) if self.doing == "step" else returned

    def _other(self, seen: Any, *rest: Any) -> Any:
        reward, terminated, truncated = rest[:3] if len(rest) == 4 else (0.0, False, False)
        step: dict[str, Any] = {
            "gym's old tuple": (seen, reward, terminated, {}),
            "a reward for each of three": (seen, np.ones(3), terminated, truncated, {}),
            "no reward": (seen, None, terminated, truncated, {}),
            "an infinite reward": (seen, np.inf, terminated, truncated, {}),
            "two ends": (seen, reward, np.zeros(2, bool), truncated, {}),
            "no info": (seen, reward, terminated, truncated, None),
            "nan": (seen * np.nan, reward, terminated, truncated, {}),
        }
        reset: dict[str, Any] = {"no tuple": seen, "nan": (seen * np.nan, {}), "no info": (seen, 0)}
        return (step if len(rest) == 4 else reset)[self.what]


class Keys(Counting):
    """Shows a Dict without one of its keys, or no Dict at all."""

    def __init__(self, shown: str) -> None:
        super().__init__()
        box = gymnasium.spaces.Box(-1.0, 1.0, (1,))
        self.observation_space = gymnasium.spaces.Dict({"hand": box, "goal": box})
        self.shown = shown

    def _shown(self) -> Any:
        return {"hand": np.zeros(1, np.float32)} if self.shown == "hand" else np.zeros(2)


class Many(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Returns arrays of a wrong shape."""

    def __init__(self, num_envs: int, wrong: str) -> None:
        self.num_envs, self.wrong = num_envs, wrong
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,))
        self.single_action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **options: Any) -> Any:
        return self._seen("reset"), {}

    def step(self, actions: Any) -> Any:
        each = [
            np.zeros((self.num_envs, 1) if name == self.wrong else self.num_envs)
            for name in ("rewards", "terminations", "truncations")
        ]
        return self._seen("step"), *each, {}

    def _seen(self, doing: str) -> Any:
        return np.zeros((self.num_envs, 4 if doing == self.wrong else 3), np.float32)


class Cut(Many):
    """Cuts an episode at its third step."""

    def __init__(self, num_envs: int, shown: str) -> None:
        super().__init__(num_envs, wrong="")
        self.shown, self.steps = shown, 0

    def step(self, actions: Any) -> Any:
        self.steps += 1
        shown, rewards, ends, cuts, _ = super().step(actions)
        cuts[1] = self.steps == 3
        return shown, rewards, ends, cuts, {self.shown: shown} if cuts.any() else {}


class Bare(gymnasium.Env[Any, Any]):
    """Has no spaces."""


class Unseeded(Counting):
    """Resets as Gym did before 0.26."""

    def reset(self) -> Any:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().reset()


def of(entry: str, **kwargs: Any) -> EnvConfig:
    return EnvConfig(entry_point=f"{HERE}:{entry}", kwargs=kwargs)


@pytest.mark.parametrize(
    ("doing", "what", "said"),
    [
        ("reset", "no tuple", r"a value of type ndarray; it has to return observation, info"),
        ("reset", "no info", r"a value of type int as info, which has to be a dict"),
        ("reset", "nan", r"an observation with 2 values that are NaN or infinite as float32"),
        (
            "step",
            "gym's old tuple",
            r"4 values; it has to return observation, reward, t.*0\.26",
        ),
        ("step", "a reward for each of three", r".* of shape \(3,\) as reward, which is no"),
        ("step", "no reward", r"a value of type NoneType as reward, which is no number"),
        ("step", "an infinite reward", r"the reward inf"),
        ("step", "two ends", r"terminated of shape \(2,\), which is no bool"),
        ("step", "no info", r"a value of type NoneType as info, which has to be a dict"),
        ("step", "nan", r"an observation with 2 values that are NaN or infinite as float32"),
    ],
)
def test_what_a_reset_or_a_step_returns_is_named(doing: str, what: str, said: str) -> None:
    with pytest.raises(EnvError, match=rf"Returning: {doing}\(\) returned {said}"):
        describe_env(of("Returning", doing=doing, what=what), probe=True)


def test_a_reset_that_takes_no_seed_is_named() -> None:
    with pytest.raises(EnvError, match=r"Unseeded: reset\(\) takes no seed; Gymnasium's is reset"):
        describe_env(of("Unseeded"))


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("hand", r"an observation without 'goal', which its space has"),
        ("array", r"a value of type ndarray as observation, which its space is not"),
    ],
)
def test_an_observation_that_is_not_of_its_space_is_named(shown: str, said: str) -> None:
    with pytest.raises(EnvError, match=rf"Keys: reset\(\) returned {said}"):
        describe_env(of("Keys", shown=shown), probe=True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("reset", r"reset\(\) returned observations of shape \(8, 4\)"),
        ("step", r"step\(\) returned observations of shape \(8, 4\)"),
        ("rewards", r"step\(\) returned rewards of shape \(8, 1\), there are 8 environments"),
        ("truncations", r"step\(\) returned truncations of shape \(8, 1\)"),
    ],
)
def test_arrays_of_many_environments_are_looked_at_too(wrong: str, said: str) -> None:
    config = EnvConfig(
        entry_point=f"{HERE}:Many", kwargs={"wrong": wrong}, simulator="vector", stages=1
    )
    with pytest.raises(EnvError, match=said):
        describe_env(config, probe=True)


def test_episodes_that_are_cut_without_their_last_observation_are_named() -> None:
    config = EnvConfig(
        entry_point=f"{HERE}:Cut", kwargs={"shown": "last"}, simulator="vector", stages=1
    )
    with pytest.raises(EnvError, match=r"Cut: step\(\) returned episodes .* none of final_obs and"):
        describe_env(config, probe=True)
    for fine in (
        msgspec.structs.replace(config, kwargs={"shown": "final_obs"}),
        msgspec.structs.replace(config, autoreset="next_step"),
    ):
        describe_env(fine, probe=True)
    describe_env(config)  # takes no step


def test_an_environment_without_spaces_is_named() -> None:
    with pytest.raises(ConfigError, match="a Bare without observation_space, which every"):
        describe_env(of("Bare"))


def test_a_single_environment_that_is_to_be_many_says_what_to_set() -> None:
    config = EnvConfig(entry_point=f"{HERE}:Bare", simulator="vector", stages=1)
    with pytest.raises(EnvError, match=r"takes num_envs, and .* set env\.simulator = 'single'"):
        describe_env(config, probe=True)
