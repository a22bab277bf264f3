"""Evaluation: fixed seeds, whole episodes, and environments of its own."""

from __future__ import annotations

import pytest

import rlinf_async as ra
from rlinf_async.messages.embodied import Collect
from rlinf_async.testing import explore
from rlinf_async.workers.env import EnvConfig, EnvWorker, EvaluatedEpisode, EvaluationPlan
from rlinf_async.workers.env.config import env_seed, episode_seed
from tests.workers.env.toy import Channels, ChoosingRollout, ToyRollout, counting, drawing, weights


async def evaluated(
    config: EnvConfig, rollout_class: type[ToyRollout], plan: EvaluationPlan, ranks: int = 1
) -> list[EvaluatedEpisode]:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        envs = await cluster.launch(EnvWorker, config, count=ranks)
        rollout = await cluster.launch(rollout_class, None)
        serving = rollout.call(
            rollout_class.serve,
            channels.observations.receiver,
            channels.actions.sender,
            channels.weights.receiver,
        )
        await channels.weights.sender.publish(weights(4))
        found = await envs.call(
            EnvWorker.evaluate, plan, channels.observations.sender, channels.actions.receiver
        )
        await serving
        return [episode for rank in found for episode in rank]


async def test_the_most_likely_actions_act_and_whole_episodes_count() -> None:
    plan = EvaluationPlan(episodes=3)
    found = await evaluated(counting(envs=2), ToyRollout, plan)
    # Two environments begin with an odd episode, which takes 3 steps and succeeds; the one that is
    # free first goes on with an even one. The mode is minus the toy action.
    odd = EvaluatedEpisode(
        episode=0,
        episode_return=-10.0 * (5 + 7 + 9) + 6,
        length=3,
        success=True,
        version=4,
    )
    assert found[0] == odd
    assert [one.episode for one in found] == [0, 1, 2]
    assert [one.length for one in found] == [3, 3, 2]
    assert [one.success for one in found] == [True, True, False]


async def test_an_episode_that_does_not_end_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlinf_async.workers.env.evaluation.LONG_EPISODE", 2)
    await evaluated(counting(envs=2), ToyRollout, EvaluationPlan(episodes=1))
    assert "episode 0 of the evaluation" in caplog.text
    assert "has not ended after 2 steps" in caplog.text
    assert "gymnasium.wrappers.TimeLimit" in caplog.text


async def test_how_many_workers_and_envs_there_are_changes_no_episode() -> None:
    plan = EvaluationPlan(episodes=7, seed=3)
    alone = await evaluated(drawing(envs=1, stages=1), ChoosingRollout, plan)
    many = await evaluated(drawing(envs=4, stages=2, seed=9), ChoosingRollout, plan, ranks=2)
    assert len({one.episode_return for one in alone}) == 7
    assert sorted(many, key=lambda one: one.episode) == alone


async def test_more_workers_than_episodes_leave_some_with_none() -> None:
    found = await evaluated(counting(), ToyRollout, EvaluationPlan(episodes=1), ranks=3)
    assert [one.episode for one in found] == [0]


def test_evaluating_leaves_what_is_being_collected_as_it_is() -> None:
    async def collected(evaluate: bool) -> list[list[float]]:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            envs = await cluster.launch(EnvWorker, counting())
            rollout = await cluster.launch(ToyRollout, None)
            serving = rollout.call(
                ToyRollout.serve,
                channels.observations.receiver,
                channels.actions.sender,
                channels.weights.receiver,
            )
            collecting = envs.call(
                EnvWorker.collect,
                channels.tickets.receiver,
                channels.observations.sender,
                channels.actions.receiver,
                channels.trajectories.sender,
            )
            await channels.weights.sender.publish(weights(0))
            await channels.issue([Collect(iteration=0, steps=9, min_version=0)])
            if evaluate:
                plan = EvaluationPlan(episodes=3)
                await envs.call(
                    EnvWorker.evaluate,
                    plan,
                    channels.observations.sender,
                    channels.actions.receiver,
                )
            await collecting
            await serving
            return [one.reward[:, 0].tolist() for one in channels.collected()]

    for with_it in explore(lambda: collected(True), seeds=range(20)):
        assert with_it in explore(lambda: collected(False), seeds=range(1))


def test_seeds_differ_in_everything_that_tells_environments_apart() -> None:
    parts = [
        {"rank": rank, "stage": stage, "env": env, "incarnation": incarnation}
        for rank in range(3)
        for stage in range(3)
        for env in range(4)
        for incarnation in range(2)
    ]
    seeds = {env_seed(0, **part) for part in parts} | {env_seed(1, **part) for part in parts}
    assert len(seeds) == 2 * len(parts)
    assert not seeds & {episode_seed(0, episode) for episode in range(100)}


@pytest.mark.parametrize("life", [0, 1])
async def test_a_restarted_worker_begins_with_other_seeds(life: int) -> None:
    seeds = [env_seed(5, rank=0, stage=0, env=0, incarnation=n) for n in (life, life + 1)]
    assert seeds[0] != seeds[1]
