"""Registered environments, stepped for real."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.backends.base import PolicyAnswer, PolicyBackend
from rlinf_async.messages.embodied import Collect, Floats, Trajectory
from rlinf_async.workers.env import EnvConfig, EnvSpec, EnvWorker, describe_env
from tests.workers.env.toy import Channels, ToyPolicy, ToyRollout, weights


class RandomPolicy(ToyPolicy):
    """Draws actions from a seed."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self._spec = spec
        self._random = np.random.default_rng(0)

    def act(self, observation: Floats) -> PolicyAnswer:
        zeros = np.zeros(len(observation), np.float32)
        if self._spec.discrete:
            action: Any = self._random.integers(self._spec.action_size, size=len(observation))
        else:
            shape = (len(observation), self._spec.action_size)
            action = self._random.normal(size=shape).astype(np.float32)
        return PolicyAnswer(action, zeros, zeros + 1)

    def value(self, observation: Floats) -> Floats:
        return np.ones(len(observation), np.float32)


class RandomRollout(ToyRollout):
    """A rollout worker over `RandomPolicy`; its configuration is what a policy must know."""

    def make_policy(self) -> PolicyBackend:
        return RandomPolicy(self._policy_config)


async def collected(config: EnvConfig, tickets: int, steps: int) -> list[Trajectory]:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        envs = await cluster.launch(EnvWorker, config)
        spec = await envs[0].call(EnvWorker.describe)
        assert spec == describe_env(config)
        rollout = await cluster.launch(RandomRollout, spec)
        serving = rollout.call(
            RandomRollout.serve,
            channels.observations.receiver,
            channels.actions.sender,
            channels.weights.receiver,
        )
        await channels.weights.sender.publish(weights(0))
        collecting = envs.call(
            EnvWorker.collect,
            channels.tickets.receiver,
            channels.observations.sender,
            channels.actions.receiver,
            channels.trajectories.sender,
        )
        await channels.issue(
            Collect(iteration=n, steps=steps, min_version=0) for n in range(tickets)
        )
        await collecting
        await serving
        return channels.collected()


async def test_cart_pole_terminates_and_takes_choices() -> None:
    made = await collected(EnvConfig(id="CartPole-v1", envs=4), tickets=2, steps=60)
    assert [one.observation.shape for one in made] == [(60, 2, 4)] * 4
    assert made[0].action.dtype == np.int64
    assert made[0].action.shape == (60, 2)
    assert any(one.terminated.any() for one in made)
    assert not any(one.truncated.any() or one.final_value.any() for one in made)
    ended = [length for one in made for length in one.episode_length]
    assert ended == [int(total) for one in made for total in one.episode_return]


async def test_pendulum_is_cut_every_200_steps_with_a_final_value() -> None:
    made = await collected(EnvConfig(id="Pendulum-v1", envs=2, stages=1), tickets=2, steps=150)
    assert np.flatnonzero(made[0].truncated[:, 0]).size == 0
    assert np.flatnonzero(made[1].truncated[:, 0]).tolist() == [49]
    assert made[1].final_value[49].tolist() == [1.0, 1.0]
    assert made[1].episode_length == [200, 200]
    assert made[1].episode_success == [None, None]
    total = made[0].reward[:, 0].sum() + made[1].reward[:50, 0].sum()
    assert made[1].episode_return[0] == pytest.approx(total, rel=1e-5)


async def test_the_same_seed_gives_the_same_trajectories_and_another_seed_others() -> None:
    config = EnvConfig(id="Pendulum-v1", envs=2, stages=1, seed=1)
    first, second = [(await collected(config, 1, 20))[0] for _ in range(2)]
    np.testing.assert_array_equal(first.observation, second.observation)
    other = EnvConfig(id="Pendulum-v1", envs=2, stages=1, seed=2)
    assert not np.array_equal(first.observation, (await collected(other, 1, 20))[0].observation)


@pytest.fixture
def robotics() -> None:
    """Imported outside of a test's loop, for it takes long."""
    pytest.importorskip("gymnasium_robotics")


@pytest.mark.usefixtures("robotics")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
async def test_fetch_reach_shows_goals_and_tells_success() -> None:
    made = await collected(EnvConfig(id="FetchReachDense-v4", envs=2), tickets=1, steps=60)
    assert [one.observation.shape for one in made] == [(60, 1, 16)] * 2
    for one in made:
        # Sorted keys: achieved_goal, desired_goal, observation, which begins with the gripper.
        np.testing.assert_allclose(one.observation[..., :3], one.observation[..., 6:9], atol=1e-6)
        assert np.ptp(one.observation[:50, 0, 3:6], axis=0).max() == 0  # one goal an episode
        assert np.flatnonzero(one.truncated[:, 0]).tolist() == [49]
        assert len(one.episode_success) == 1
        assert one.episode_length == [50]
