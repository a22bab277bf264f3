"""Which questions are answered when, under which weights, and what happens on interruption."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.backends.base import PolicyAnswer, PolicyBackend, PolicyOutputError
from rlinf_async.channels.queue import statistics_of
from rlinf_async.messages.embodied import Actions, Floats, Observations, stage_key
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.testing import explore, nothing_left_waiting, wait_all_blocked
from rlinf_async.workers.rollout.policy import RolloutConfig, RolloutReport, WeightsEnded
from tests.workers.env.toy import Channels, ToyPolicy, ToyRollout, toy_action, toy_value, weights


class Watched(ToyRollout):
    """A rollout worker whose policy the test can look at."""

    async def forwards(self) -> list[int]:
        """Rows of each forward pass."""
        policy = self._policy
        assert isinstance(policy, ToyPolicy)
        return policy.forwards


def question(env_rank: int = 0, stage: int = 0, rows: int = 2, **fields: Any) -> Observations:
    """A question whose observations tell who asks."""
    shown = np.array([[env_rank * 10 + stage, row] for row in range(rows)], np.float32)
    given: dict[str, Any] = {"incarnation": 0, "sequence": 1, "min_version": 0} | fields
    return Observations(env_rank=env_rank, stage=stage, observation=shown, **given)


def serve(
    rollout: ra.WorkerGroup[Any], channels: Channels, ranks: Iterable[int] = (0,)
) -> ra.GroupCall[list[RolloutReport]]:
    return rollout.call_on(
        ranks,
        ToyRollout.serve,
        channels.observations.receiver,
        channels.actions.sender,
        channels.weights.receiver,
    )


async def ask(channels: Channels, *questions: Observations) -> None:
    for one in questions:
        await channels.observations.sender.put(one, weight=len(one.observation))


async def answer(channels: Channels, env_rank: int = 0, stage: int = 0) -> Actions:
    return await channels.actions.receiver.get(key=stage_key(env_rank, stage))


def right(asked: Observations, got: Actions, version: int) -> None:
    """The answer is that of `ToyPolicy` under this version."""
    assert (got.sequence, got.incarnation, got.version) == (
        asked.sequence,
        asked.incarnation,
        version,
    )
    np.testing.assert_array_equal(got.value, toy_value(asked.observation, version))
    if asked.value_only:
        assert got.action is None
        assert got.log_prob is None
    else:
        np.testing.assert_array_equal(
            np.asarray(got.action), toy_action(asked.observation, version)
        )
        np.testing.assert_array_equal(np.asarray(got.log_prob), np.asarray(got.action)[:, 0] + 7)
    if asked.final_observation is not None:
        expected = toy_value(asked.final_observation, version)
        np.testing.assert_array_equal(np.asarray(got.final_value), expected)


async def test_all_that_is_ready_is_answered_in_one_forward_pass() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rollout = await cluster.launch(Watched, None)
        final = np.array([[5, 6], [7, 8], [9, 1]], np.float32)
        asked = [
            question(0, 0),
            question(0, 1, rows=1, final_observation=final[:1]),
            question(1, 0, rows=3, value_only=True),
            question(1, 1, value_only=True, final_observation=final[1:]),
        ]
        await channels.weights.sender.publish(weights(0))
        await ask(channels, *asked)
        serving = serve(rollout, channels)
        for one in asked:
            right(one, await answer(channels, one.env_rank, one.stage), 0)
        assert await rollout[0].call(Watched.forwards) == [2 + 1 + 3 + 2 + 1 + 2]
        channels.observations.close()
        [report] = await serving
        assert (report.questions, report.observations, report.forwards) == (4, 8, 1)
        assert report.version == 0


async def test_a_batch_is_no_larger_than_it_may_be() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rollout = await cluster.launch(Watched, None, RolloutConfig(max_batch=4))
        await channels.weights.sender.publish(weights(0))
        first = question(9)
        await ask(channels, first, *(question(0, stage) for stage in range(5)), question(1, rows=6))
        channels.observations.close()
        await serve(rollout, channels)
        forwards = await rollout[0].call(Watched.forwards)
        assert sorted(forwards) == [4, 4, 4, 6]  # what is larger by itself goes alone


def test_a_question_that_needs_newer_weights_holds_up_no_other() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(ToyRollout, None)
            serving = serve(rollout, channels)
            await channels.weights.sender.publish(weights(0))
            late = [question(0, 0, min_version=2), question(0, 1, min_version=1)]
            await ask(channels, late[0], question(1), late[1])
            right(question(1), await answer(channels, 1), 0)
            await ask(channels, question(1, sequence=2))
            right(question(1, sequence=2), await answer(channels, 1), 0)
            await wait_all_blocked()
            assert statistics_of(channels.actions.queue).depth == 0
            await channels.weights.sender.publish(weights(1))
            right(late[1], await answer(channels, 0, 1), 1)
            await wait_all_blocked()
            assert statistics_of(channels.actions.queue).depth == 0
            await channels.weights.sender.publish(weights(3))
            right(late[0], await answer(channels, 0, 0), 3)
            channels.observations.close()
            [report] = await serving
            assert report.set_aside >= 2
            nothing_left_waiting(channels.observations, channels.actions)

    explore(body, seeds=range(60))


async def test_deterministic_questions_get_the_most_likely_actions_beside_sampled_ones() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rollout = await cluster.launch(ToyRollout, None)
        await channels.weights.sender.publish(weights(2))
        sampled, likely = question(0, 0), question(0, 1, rows=1, deterministic=True)
        await ask(channels, sampled, likely)
        channels.observations.close()
        await serve(rollout, channels)
        right(sampled, await answer(channels, 0, 0), 2)
        got = await answer(channels, 0, 1)
        np.testing.assert_array_equal(np.asarray(got.action), -toy_action(likely.observation, 2))
        np.testing.assert_array_equal(got.value, toy_value(likely.observation, 2))
        assert got.log_prob is None


def test_whoever_takes_a_question_over_answers_it() -> None:
    seeds = iter(range(1000))
    redelivered: list[int] = []

    async def body() -> None:
        chance = random.Random(next(seeds))
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(ToyRollout, None, count=2)
            await channels.weights.sender.publish(weights(0))
            with channels.observations.receiver, channels.actions.sender:
                first = serve(rollout, channels, [0])
                asked = [
                    question(rank, stage, min_version=rank % 2)
                    for rank in range(4)
                    for stage in range(2)
                ]
                await ask(channels, *asked)
                await _some_turns(chance.randrange(2, 12), channels)
                first.cancel()
                await first.finished(within=9)
                second = serve(rollout, channels, [1])
                await channels.weights.sender.publish(weights(1))
                for one in asked:
                    got = await answer(channels, one.env_rank, one.stage)
                    right(one, got, got.version)
                    assert got.version >= one.min_version
                redelivered.append(statistics_of(channels.observations.queue).redelivered)
                channels.observations.close()
            await second

    explore(body, seeds=range(60))
    assert sum(redelivered) > 20


async def _some_turns(turns: int, channels: Channels) -> None:
    """Let the others run for a few turns of the loop, but at least until one took a question."""
    for _ in range(200):
        turns -= 1
        if turns < 0 and statistics_of(channels.observations.queue).receivers > 1:
            return
        await asyncio.sleep(0)


async def test_an_answer_that_nobody_is_left_to_take_is_counted() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rollout = await cluster.launch(ToyRollout, None)
        with channels.actions.receiver:
            await ask(channels, question())
        channels.observations.close()
        await channels.weights.sender.publish(weights(0))
        [report] = await serve(rollout, channels)
        assert report.unwanted == 1


async def test_weights_that_will_never_come_are_an_error_and_not_a_hang() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rollout = await cluster.launch(ToyRollout, None)
        serving = serve(rollout, channels)
        await channels.weights.sender.publish(weights(0))
        await ask(channels, question(min_version=1))
        channels.weights.sender.close()
        with pytest.raises(
            ra.WorkerError, match="version 1 are asked for, the newest are 0"
        ) as got:
            await serving
        assert isinstance(got.value.__cause__, WeightsEnded)


async def test_weights_that_ended_still_answer_what_they_can() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rollout = await cluster.launch(ToyRollout, None)
        await channels.weights.sender.publish(weights(6))
        channels.weights.sender.close()
        await ask(channels, question(min_version=6))
        channels.observations.close()
        [report] = await serve(rollout, channels)
        right(question(), await answer(channels), 6)
        assert report.version == 6


class Broken(ToyPolicy):
    """Returns NaN in one output."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def act(self, observation: Floats) -> PolicyAnswer:
        good = super().act(observation)
        bad: Any = np.full_like(getattr(good, self._name), np.nan)
        return good._replace(**{self._name: bad})


class BrokenRollout(ToyRollout):
    """A rollout worker over `Broken`."""

    def make_policy(self) -> PolicyBackend:
        return Broken(self._policy_config)


@pytest.mark.parametrize("name", ["action", "log_prob", "value"])
async def test_a_policy_that_returns_nan_is_named_with_its_version(name: str) -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rollout = await cluster.launch(BrokenRollout, name)
        serving = serve(rollout, channels)
        await channels.weights.sender.publish(weights(4))
        await ask(channels, question())
        with pytest.raises(
            ra.WorkerError, match=f"version 4, returned '{name}' with 2 of 2"
        ) as got:
            await serving
        assert isinstance(got.value.__cause__, PolicyOutputError)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda update: _flipped(update), "checksum"),
        (lambda update: WeightUpdate(update.version, (), update.checksum), "checksum"),
    ],
)
async def test_a_damaged_update_is_an_error_and_never_loaded(
    damage: Callable[[WeightUpdate], WeightUpdate], said: str
) -> None:
    from rlinf_async.backends.policies.config import PolicyConfig
    from rlinf_async.workers.rollout.policy import RolloutWorker

    config = PolicyConfig(observation_size=2, action_size=1)
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rollout = await cluster.launch(RolloutWorker, config)
        serving = serve(rollout, channels)
        await channels.weights.sender.publish(_packed(config, 0))
        await ask(channels, question())
        assert (await answer(channels)).version == 0
        await channels.weights.sender.publish(damage(_packed(config, 1)))
        with pytest.raises(ra.WorkerError, match=said) as got:
            await serving
        assert type(got.value.__cause__).__name__ == "WeightsDamaged"


async def test_ranks_and_lives_draw_different_actions() -> None:
    from rlinf_async.backends.policies.config import PolicyConfig
    from rlinf_async.workers.rollout.policy import RolloutWorker

    config = PolicyConfig(observation_size=2, action_size=1)
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rollout = await cluster.launch(RolloutWorker, config, count=2)
        await channels.weights.sender.publish(_packed(config, 0))
        drawn = []
        with channels.observations.receiver, channels.actions.sender:
            for rank in (0, 1):
                serving = serve(rollout, channels, [rank])
                await ask(channels, question(rows=3))
                drawn.append((await answer(channels)).action)
                serving.cancel()
                await serving.finished(within=9)
        assert not np.array_equal(np.asarray(drawn[0]), np.asarray(drawn[1]))


def test_a_config_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch is 0"):
        RolloutConfig(max_batch=0)


def _packed(config: Any, version: int) -> WeightUpdate:
    import torch

    from rlinf_async.backends.policies.mlp import MlpGaussianPolicy
    from rlinf_async.weights.pack import pack

    torch.manual_seed(0)
    return pack(MlpGaussianPolicy(config).state_dict(), version)


def _flipped(update: WeightUpdate) -> WeightUpdate:
    update.buckets[0].data[3] ^= 1
    return update
