"""An env worker and a rollout worker in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.backends.base import PolicyAnswer, PolicyBackend, PolicyOutputError
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.messages.embodied import Collect
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.testing import explore, nothing_left_waiting, wait_all_blocked
from rlinf_async.workers.collocated import CollocatedEnvWorker
from rlinf_async.workers.env import EnvConfig, EnvReport, EvaluatedEpisode
from rlinf_async.workers.env.worker import EvaluationPlan
from rlinf_async.workers.rollout.policy import WeightsEnded
from tests.workers.env.toy import (
    Channels,
    Counting,
    ToyPolicy,
    ToyRollout,
    by_hand,
    counting,
    weights,
)


class Open(Counting):
    """Counts those of its kind that nobody has closed."""

    count: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        Open.count += 1

    def close(self) -> None:
        Open.count -= 1


ENV = EnvConfig(id="Open", entry_point=f"{__name__}:Open", envs=2)


@pytest.mark.parametrize("loop_kind", ["uvloop"])
async def test_no_environment_stays_open_where_the_policy_cannot_be_made(loop_kind: str) -> None:
    wrong = PolicyConfig(name="none", observation_size=2, action_size=1)
    async with ra.Cluster.local() as cluster:
        with pytest.raises(ra.WorkerError, match="none"):
            await cluster.launch(CollocatedEnvWorker, ENV, wrong)
    assert Open.count == 0


@pytest.mark.parametrize("loop_kind", ["uvloop"])
async def test_environments_are_closed_at_the_end(loop_kind: str) -> None:
    right = PolicyConfig(observation_size=2, action_size=1)
    async with ra.Cluster.local() as cluster:
        await cluster.launch(CollocatedEnvWorker, ENV, right)
        assert Open.count > 0
    assert Open.count == 0


class Toy(CollocatedEnvWorker):
    """Answers by `ToyPolicy`."""

    rollout_type = ToyRollout


class BrokenRollout(ToyRollout):
    """Its policy returns NaN as values."""

    def make_policy(self) -> PolicyBackend:
        return Broken()


class Broken(ToyPolicy):
    def act(self, observation: Any) -> PolicyAnswer:
        return super().act(observation)._replace(value=np.full(len(observation), np.nan))


class BrokenToy(CollocatedEnvWorker):
    rollout_type = BrokenRollout


def start(
    envs: ra.WorkerGroup[CollocatedEnvWorker], channels: Channels
) -> ra.GroupCall[list[EnvReport]]:
    return envs.call(
        CollocatedEnvWorker.collect,
        channels.tickets.receiver,
        channels.trajectories.sender,
        channels.weights.receiver,
    )


class Running(NamedTuple):
    """A collection under way."""

    channels: Channels
    envs: ra.WorkerGroup[CollocatedEnvWorker]
    collecting: ra.GroupCall[list[EnvReport]]

    def evaluate(self, plan: EvaluationPlan) -> ra.GroupCall[list[list[EvaluatedEpisode]]]:
        return self.envs.call(CollocatedEnvWorker.evaluate, plan, self.channels.weights.receiver)


@asynccontextmanager
async def running(
    kind: type[CollocatedEnvWorker],
    first: WeightUpdate,
    policy: PolicyConfig | None = None,
    *,
    stages: int = 1,
) -> AsyncIterator[Running]:
    """Two environments that are collected in, once the first weights are published."""
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        envs = await cluster.launch(kind, counting(envs=2, stages=stages), policy)
        await channels.weights.sender.publish(first)
        yield Running(channels, envs, start(envs, channels))


def tickets(*steps: int, min_version: int = 0) -> list[Collect]:
    return [Collect(iteration=n, steps=s, min_version=min_version) for n, s in enumerate(steps)]


def test_a_trajectory_is_what_stepping_by_hand_gives_under_every_schedule() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            envs = await cluster.launch(Toy, counting(envs=4, stages=2), None)
            collecting = start(envs, channels)
            await channels.weights.sender.publish(weights(3))
            await channels.issue(tickets(7, 4, 6))
            [report] = await collecting
            collected = channels.collected()
            assert [(one.iteration, one.stage) for one in collected] == [
                (iteration, stage) for iteration in range(3) for stage in range(2)
            ]
            for stage in range(2):
                expected = by_hand(2, tickets(7, 4, 6), version=3)
                for trajectory, wanted in zip(collected[stage::2], expected, strict=True):
                    for name, value in wanted.items():
                        np.testing.assert_array_equal(getattr(trajectory, name), value, name)
            assert report == EnvReport(tickets=3, env_steps=17 * 4, episodes=6 * 4)
            nothing_left_waiting(channels.tickets)

    explore(body, seeds=range(40))


async def test_a_question_waits_for_its_weights_whatever_ends_meanwhile() -> None:
    """An evaluation follows the weights too, and its end is not theirs."""
    async with running(Toy, weights(0)) as run:
        channels, collecting = run.channels, run.collecting
        await channels.issue(tickets(4, min_version=1))
        await wait_all_blocked()
        plan = EvaluationPlan(episodes=2, min_version=0)
        [episodes] = await run.evaluate(plan)
        assert [one.version for one in episodes] == [0, 0]
        await wait_all_blocked()
        assert not collecting.done()
        assert not channels.collected()
        await channels.weights.sender.publish(weights(1))
        await collecting
        [trajectory] = channels.collected()
        assert trajectory.version.tolist() == [1, 1, 1, 1]


async def test_weights_that_will_not_come_are_an_error() -> None:
    async with running(Toy, weights(0)) as run:
        channels, collecting = run.channels, run.collecting
        await channels.issue(tickets(4, min_version=1))
        channels.weights.sender.close()
        with pytest.raises(ra.WorkerError, match="version 1 are asked for") as got:
            await collecting
        assert isinstance(got.value.__cause__, WeightsEnded)


async def test_a_policy_that_returns_nan_is_named_with_its_version() -> None:
    async with running(BrokenToy, weights(4)) as run:
        channels, collecting = run.channels, run.collecting
        await channels.issue(tickets(4))
        with pytest.raises(ra.WorkerError, match="version 4, returned 'value'") as got:
            await collecting
        assert isinstance(got.value.__cause__, PolicyOutputError)


async def test_a_damaged_update_ends_a_collection_that_waits_for_tickets() -> None:
    from rlinf_async.backends.policies.mlp import MlpGaussianPolicy
    from rlinf_async.weights.pack import pack

    config = PolicyConfig(observation_size=2, action_size=1)
    update = pack(dict(MlpGaussianPolicy(config).state_dict()), 0, 1 << 20)
    async with running(CollocatedEnvWorker, update, config) as run:
        channels, collecting = run.channels, run.collecting
        with channels.tickets.sender as sender:
            await sender.put(tickets(3)[0], key=0)
            await channels.trajectories.receiver.get(key=0)
            damaged = msgspec.structs.replace(update, version=1, checksum=update.checksum ^ 1)
            await channels.weights.sender.publish(damaged)
            with pytest.raises(ra.WorkerError, match="checksum") as got:
                await collecting
        assert type(got.value.__cause__).__name__ == "WeightsDamaged"


async def test_an_evaluation_of_nothing_does_not_hide_that_no_weights_will_come() -> None:
    """It follows the weights for a moment that is too short for its task to begin."""
    async with running(Toy, weights(0)) as run:
        channels, collecting = run.channels, run.collecting
        await wait_all_blocked()
        channels.weights.sender.close()
        await wait_all_blocked()
        plan = EvaluationPlan(episodes=0)
        assert await run.evaluate(plan) == [[]]
        await channels.issue(tickets(4, min_version=1))
        with pytest.raises(ra.WorkerError, match="version 1 are asked for"):
            await collecting


def test_a_cancelled_collection_says_nothing_to_an_evaluation_under_any_schedule() -> None:
    async def body() -> None:
        async with running(Toy, weights(0), stages=2) as run:
            channels, collecting = run.channels, run.collecting
            with channels.tickets.receiver, channels.trajectories.sender:
                await channels.issue(tickets(4, min_version=1))
                plan = EvaluationPlan(episodes=2, min_version=1)
                evaluating = run.evaluate(plan)
                collecting.cancel()
                await collecting.finished(within=9)
                again = start(run.envs, channels)
                await channels.weights.sender.publish(weights(1))
                [episodes] = await evaluating
                [report] = await again
            assert [one.version for one in episodes] == [1, 1]
            assert report.tickets == 1
            assert [one.stage for one in channels.collected()] == [0, 1]

    explore(body, seeds=range(40))
