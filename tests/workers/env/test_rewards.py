"""Rewards that cannot be trained on, from every kind of simulator: named where they are paid."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from rlinf_async.messages.language import MAX_REWARD
from rlinf_async.workers.env import EnvConfig, EnvError, EnvFailed, describe_env
from rlinf_async.workers.env.worker import Environments
from tests.workers.env.failing import Failing, FailingInTurn

HERE = "tests.workers.env.test_rewards"


class Paying(Failing):
    """Pays this reward in every step."""

    def __init__(self, reward: float) -> None:
        super().__init__()
        self.reward = reward

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        shown, _, terminated, truncated, info = super().step(action)
        return shown, self.reward, terminated, truncated, info


def paying_many(num_envs: int, reward: float) -> Any:
    return gymnasium.vector.SyncVectorEnv([lambda: Paying(reward)] * num_envs)


def paying_words(num_envs: int, reward: float) -> Any:
    many = paying_many(num_envs, reward)
    step = many.step

    def in_words(actions: Any) -> Any:
        shown, _, *rest = step(actions)
        return shown, np.array(["much"] * num_envs), *rest

    many.step = in_words
    return many


class PayingInTurn(FailingInTurn):
    """The same, of those that are ready."""

    def __init__(self, num_envs: int, seed: int, reward: float) -> None:
        super().__init__(num_envs, seed)
        self.many.one = Paying(reward)


def config_of(simulator: str, entry: str, reward: float) -> EnvConfig:
    return EnvConfig(
        entry_point=f"{HERE}:{entry}",
        kwargs={"reward": reward},
        simulator=simulator,  # type: ignore[arg-type]
        envs=2,
        stages=1,
    )


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (1e300, "the reward 1e+300, beyond 1e+18, which training cannot compute with: scale it"),
        (-2 * MAX_REWARD, "the reward -2e+18, beyond 1e+18"),
        (float("-inf"), "the reward -inf"),
        (float("nan"), "the reward nan"),
        (-MAX_REWARD, ""),
    ],
)
@pytest.mark.parametrize(
    ("simulator", "entry"),
    [("single", "Paying"), ("vector", "paying_many"), ("async", "PayingInTurn")],
)
def test_a_reward_that_cannot_be_trained_on_is_named(
    simulator: str, entry: str, reward: float, said: str
) -> None:
    environments = Environments(config_of(simulator, entry, reward), 0, 0)
    stage = environments.stage(0)
    stage.reset()
    rows = None if stage.rows is None else np.arange(2)
    try:
        if said:
            with pytest.raises(EnvFailed) as caught:
                stage.step(np.zeros(2, np.int64), rows)
            assert said in str(caught.value)
            assert f"{HERE}:{entry}[" in str(caught.value)
        else:
            assert (stage.step(np.zeros(2, np.int64), rows).reward == np.float32(reward)).all()
    finally:
        stage.close()
        environments.close()


def test_rewards_that_are_no_numbers_are_an_error_of_the_simulator() -> None:
    environments = Environments(config_of("vector", "paying_words", 0.0), 0, 0)
    stage = environments.stage(0)
    stage.reset()
    with pytest.raises(
        EnvFailed, match=r"paying_words\[0\].* raised ValueError: could not convert"
    ):
        stage.step(np.zeros(2, np.int64))
    stage.close()


def test_a_trial_names_it_too() -> None:
    with pytest.raises(EnvError, match=r"Paying: step\(\) returned the reward 1e\+300, beyond"):
        describe_env(config_of("single", "Paying", 1e300), probe=True)
