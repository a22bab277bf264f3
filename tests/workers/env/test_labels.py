"""Rewards and successes of a user's own function: each step once, in every form of environment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlinf_async.config import ConfigError
from rlinf_async.workers.env import EnvConfig, EnvFailed, describe_env
from rlinf_async.workers.env.config import EnvRewardConfig
from rlinf_async.workers.env.labels import LabelledEnv, Steps
from rlinf_async.workers.env.many import AsyncStage
from rlinf_async.workers.env.stage import EnvStage, StageOutcome
from rlinf_async.workers.env.worker import Environments
from tests.jobs.embodied.envs import Kitchen
from tests.workers.env.toy import MAKE, make

HERE = "tests.workers.env.test_labels"
ACTIONS = np.array([[0.5], [-0.25]], np.float32)


def paid(steps: Steps) -> Any:
    """A number in which all that a step has can be read; even episodes succeed."""
    assert steps.action.shape == (len(steps.reward), 1)
    before, after = steps.observation, steps.next_observation
    # Of one episode, and one step after the other.
    assert (after - before == [0.0, 1.0]).all()
    own = 10 * steps.action[:, 0] + after[:, 1]
    np.testing.assert_array_equal(own, steps.reward)
    np.testing.assert_array_equal(steps.terminated, (after[:, 0] % 2 == 1) & (after[:, 1] == 3))
    np.testing.assert_array_equal(steps.truncated, (after[:, 0] % 2 == 0) & (after[:, 1] == 2))
    return 1000 * before[:, 0] + 100 * after[:, 1] + steps.action[:, 0], after[:, 0] % 2 == 0


def unsaid(steps: Steps) -> Any:
    return -steps.reward


def second(steps: Steps) -> Any:
    """Each second step is a success."""
    return 1.0 * (steps.next_observation[:, 1] == 2), steps.next_observation[:, 1] == 2


def broken(steps: Steps) -> Any:
    raise ArithmeticError("no idea")


def short(steps: Steps) -> Any:
    return np.zeros(len(steps.reward) + 1)


def nan(steps: Steps) -> Any:
    return np.full(len(steps.reward), np.nan)


def words(steps: Steps) -> Any:
    return ["much"] * len(steps.reward)


def ragged(steps: Steps) -> Any:
    return [[1.0], [2.0, 3.0]]


def unsure(steps: Steps) -> Any:
    return steps.reward, steps.reward * 0 + 0.5


def many(num_envs: int, autoreset: str = "same_step") -> Any:
    return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode[autoreset.upper()])


class ShowsCutOnes(SyncVectorEnv):
    """Has the last observations of episodes that were cut, which is all that training asks for."""

    def step(self, actions: Any) -> Any:
        *rest, truncations, info = super().step(actions)
        if not truncations.any():
            info = {name: one for name, one in info.items() if "final_obs" not in name}
        return (*rest, truncations, info)


def shows_cut_ones(num_envs: int) -> Any:
    return ShowsCutOnes([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


class ShowsAllButOne(ShowsCutOnes):
    """The same, of which one episode terminates where the other is cut."""

    def step(self, actions: Any) -> Any:
        shown, rewards, terminations, truncations, info = SyncVectorEnv.step(self, actions)
        if "final_obs" in info:
            terminations[0], truncations[0] = True, False
            info["_final_obs"] = np.array([False, True])
        return shown, rewards, terminations, truncations, info


def shows_all_but_one(num_envs: int) -> Any:
    return ShowsAllButOne([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def config_of(form: str, function: str = "paid", **reward: Any) -> EnvConfig:
    batched = form not in ("single", "pool")
    return EnvConfig(
        id="Toy",
        entry_point=f"{HERE}:many" if batched else MAKE,
        kwargs={"autoreset": form} if batched else {},
        simulator="vector" if batched else form,  # type: ignore[arg-type]
        envs=2,
        stages=1,
        reward=EnvRewardConfig(function=f"{HERE}:{function}", **reward),
    )


def made(config: EnvConfig) -> EnvStage:
    envs = Environments(config, 0, 0)
    envs.look()
    return envs.stage(0)


def step(stage: EnvStage) -> StageOutcome:
    """Steps of both environments; where they are ready in turn, until both have been."""
    if stage.needs_reset:
        stage.reset()
    outcome = stage.step(ACTIONS)
    while isinstance(stage, AsyncStage) and stage.in_flight:
        outcome = joined(outcome, stage.step(None, np.empty(0, np.int64)))
    return outcome


def joined(one: StageOutcome, other: StageOutcome) -> StageOutcome:
    assert one.rows is not None
    assert other.rows is not None
    rows = np.concatenate([one.rows, other.rows])
    order = np.argsort(rows)
    reward, terminated, truncated = (
        np.concatenate([getattr(one, name), getattr(other, name)])[order]
        for name in ("reward", "terminated", "truncated")
    )
    first, last = (one, other) if one.rows[0] < other.rows[0] else (other, one)
    episodes = [*first.episodes, *last.episodes]
    return StageOutcome(reward, terminated, truncated, None, episodes, rows=rows[order])


@pytest.mark.parametrize("form", ["single", "pool", "same_step", "next_step", "disabled"])
def test_each_step_is_labelled_once_and_everything_sees_the_label(form: str) -> None:
    stage = made(config_of(form))
    wanted = [(episode, at) for episode in range(1, 5) for at in range(1, 4 - (episode + 1) % 2)]
    episodes = []
    try:
        for episode, at in wanted:
            outcome = step(stage)
            if outcome.valid is not None and not outcome.valid.any():
                outcome = step(stage)
            expected = 1000 * episode + 100 * at + ACTIONS[:, 0]
            np.testing.assert_array_equal(outcome.reward, expected)
            episodes += outcome.episodes
    finally:
        stage.close()
    assert len(episodes) == 8
    for number, one in enumerate(episodes):
        episode, action = number // 2 + 1, ACTIONS[:, 0][number % 2]
        assert one.success is (episode % 2 == 0)  # the environment says the opposite
        steps = 3 - (episode + 1) % 2
        total = sum(1000 * episode + 100 * at + float(action) for at in range(1, steps + 1))
        assert one.length == steps
        assert one.episode_return == pytest.approx(total)


def test_without_a_word_of_success_that_of_the_environment_holds() -> None:
    for form in ("single", "same_step"):
        stage = made(config_of(form, "unsaid"))
        found = [one for _ in range(5) for one in step(stage).episodes]
        stage.close()
        assert [one.success for one in found] == [True, True, False, False]
        assert found[0].episode_return == -(3 * 5.0 + 1 + 2 + 3)


@pytest.mark.parametrize("form", ["single", "pool"])
def test_an_episode_may_end_with_its_first_success(form: str) -> None:
    stage = made(config_of(form, "second", ends=True))
    found = [one for _ in range(4) for one in step(stage).episodes]
    stage.close()
    assert [(one.length, one.success, one.episode_return) for one in found] == [(2, True, 1.0)] * 4


def test_each_action_of_a_chunk_is_labelled() -> None:
    base = config_of("single")
    config = EnvConfig(
        id="Toy", entry_point=MAKE, envs=1, stages=1, action_chunk=2, reward=base.reward
    )
    stage = made(config)
    stage.reset()
    outcome = stage.step(np.array([[0.5, 0.25]], np.float32))
    np.testing.assert_array_equal(outcome.action_reward, [[1100.5, 1200.25]])
    np.testing.assert_array_equal(outcome.reward, [2300.75])
    stage.close()


def test_images_texts_and_actions_of_several_parts_come_as_they_are() -> None:
    seen: list[Steps] = []

    def looked(steps: Steps) -> Any:
        seen.append(steps)
        return np.ones(1, np.float32)

    env = LabelledEnv(Kitchen(), EnvRewardConfig(function=f"{HERE}:paid"), "Kitchen")
    env._label._function = looked
    env.reset(seed=0)
    env.step({"push": np.zeros(2, np.float32), "grip": 1})
    [steps] = seen
    assert steps.observation.shape == (1,)
    assert steps.next_observation["camera"].shape == (1, 6, 6, 3)
    assert (steps.action["push"].shape, steps.action["grip"].tolist()) == ((1, 2), [1])


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("broken", "raised ArithmeticError: no idea"),
        ("short", r"returned rewards as float64 \[{more}\]; they are \[{count}\], a number for"),
        ("nan", r"returned the reward nan, of step 0 of {count}"),
        ("words", r"returned rewards as <U4 \[{count}\]; they are"),
        ("ragged", r"returned rewards as list; they are \[{count}\]"),
        ("unsure", r"returned successes \[0.5.*\]; each is True or False"),
    ],
)
@pytest.mark.parametrize("form", ["single", "same_step"])
def test_what_goes_wrong_is_named_with_function_and_step(
    form: str, function: str, problem: str
) -> None:
    config, count = config_of(form, function), 2 if form == "same_step" else 1
    said = problem.format(count=count, more=count + 1)
    named = f"'{HERE}:{function}' {said}"
    with pytest.raises(ConfigError, match=named) as refused:
        describe_env(config, probe=True)
    assert refused.value.path == ("reward", "function")
    stage = made(config)
    try:
        with pytest.raises(EnvFailed, match=rf"Toy\[0\].*step 1\b.*{named}"):
            step(stage)
    finally:
        stage.close()


@pytest.mark.parametrize("simulator", ["shows_cut_ones", "shows_all_but_one"])
def test_last_observations_that_are_not_there_are_named_before_the_run_begins(
    simulator: str,
) -> None:
    """The new episode's first observation would stand for them."""
    config = EnvConfig(
        id="Toy",
        entry_point=f"{HERE}:{simulator}",
        simulator="vector",
        envs=2,
        stages=1,
        reward=EnvRewardConfig(function=f"{HERE}:unsaid"),
    )
    missing = "info has no final_obs or final_observation of it: rewards of one's own need"
    with pytest.raises(ConfigError, match=missing):
        describe_env(config, probe=True)
    stage = made(config)
    try:
        with pytest.raises(EnvFailed, match=missing):
            [step(stage) for _ in range(5)]
    finally:
        stage.close()


def test_what_cannot_be_labelled_is_refused() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"simulator": "async"}, {}, "function"),
        ({"simulator": "envpool", "entry_point": "", "ready": 1}, {}, "function"),
        ({"simulator": "vector"}, {"ends": True}, "ends"),
        ({}, {"function": "", "ends": True}, "ends"),
    ]
    for env, reward, setting in cases:
        settings: dict[str, Any] = {"id": "Toy", "entry_point": MAKE, "envs": 2, "stages": 1, **env}
        with pytest.raises(ConfigError) as refused:
            EnvConfig(**settings, reward=EnvRewardConfig(**{"function": f"{HERE}:paid", **reward}))
        assert refused.value.path[-1] == setting
    for named in (f"{HERE}:none", f"{HERE}:joined", "nowhere.py:f"):
        config = EnvConfig(entry_point=MAKE, reward=EnvRewardConfig(function=named))
        with pytest.raises(ConfigError) as refused:
            describe_env(config)
        assert refused.value.path == ("reward", "function")
