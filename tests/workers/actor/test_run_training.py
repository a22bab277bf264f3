"""What an actor trains on, in which order, and what it says of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlinf_async as ra
from rlinf_async.backends import parts
from rlinf_async.messages.embodied import TrainReport
from rlinf_async.testing import explore, run
from tests.workers.actor.toy import (
    ENVS,
    STEPS,
    Channels,
    Place,
    Plan,
    ToyActor,
    ToyTrainer,
    env_worker,
    trajectory,
)

STAGES = 2


@pytest.fixture(autouse=True)
def toy_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(parts.trainers.paths, "toy", "tests.workers.actor.toy:ToyTrainer")
    yield
    ToyTrainer.made.clear()


def plan_of(iterations: int, env_workers: int, staleness: int = 0) -> Plan:
    return Plan(iterations, trajectories=env_workers * STAGES, max_staleness=staleness)


async def run_workers(
    plan: Plan, *, env_workers: int, actors: int = 1, twice: bool = False
) -> list[TrainReport]:
    """Env workers and actors, to the end; trainers are found in ``ToyTrainer.made``."""
    ToyTrainer.made.clear()
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        group = await cluster.launch(ToyActor, None, backend="toy", count=actors, name="Actor")
        async with asyncio.TaskGroup() as envs:
            for rank in range(env_workers):
                sender = channels.trajectories.sender.clone(f"env {rank}")
                receiver = channels.weights.receiver.clone()
                envs.create_task(
                    env_worker(rank, plan, STAGES, actors, sender, receiver, twice=twice)
                )
            with channels.trajectories.receiver:
                reports = await channels.train(group, plan)
                versions = await group.call(ToyActor.version)
                assert versions == [plan.iterations] * actors
    return reports


def share(plan: Plan, env_workers: int, actors: int, rank: int) -> list[list[Place]]:
    """What a rank has to train, iteration by iteration."""
    return [
        [
            (iteration, env, stage)
            for env in range(env_workers)
            for stage in range(STAGES)
            if (env * STAGES + stage) % actors == rank
        ]
        for iteration in range(plan.iterations)
    ]


@pytest.mark.parametrize("actors", [1, 2])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_each_rank_trains_exactly_its_share_in_the_order_of_env_and_stage(
    actors: int, staleness: int
) -> None:
    plan = plan_of(5, env_workers=3 - actors % 2, staleness=staleness)
    env_workers = plan.trajectories // STAGES

    async def main() -> None:
        reports = await run_workers(plan, env_workers=env_workers, actors=actors)
        for trainer in ToyTrainer.made:
            assert trainer.trained == share(plan, env_workers, actors, trainer.rank)
        assert sorted(report.iteration for report in reports) == sorted([*range(5)] * actors)

    explore(main, seeds=range(60))


def test_no_step_is_older_than_allowed_and_a_staleness_of_0_is_exactly_on_policy() -> None:
    def lags(staleness: int) -> list[int]:
        plan = plan_of(6, env_workers=2, staleness=staleness)
        runs = explore(lambda: run_workers(plan, env_workers=2), seeds=range(60))
        return [report.lag_max for reports in runs for report in reports]

    assert set(lags(0)) == {0}
    assert set(lags(2)) == {0, 1, 2}  # they do run ahead, and never further


def test_second_trajectories_are_left_out_and_counted_once() -> None:
    plan = plan_of(4, env_workers=2, staleness=1)

    async def main() -> None:
        reports = await run_workers(plan, env_workers=2, twice=True)
        [trainer] = ToyTrainer.made
        assert trainer.trained == share(plan, 2, 1, 0)
        seen = sum(report.duplicates for report in reports)
        # All of three iterations, and of the last those that came before it was complete.
        assert 3 * plan.trajectories <= seen < 4 * plan.trajectories
        assert [report.env_steps for report in reports] == [4 * STEPS * ENVS] * 4

    explore(main, seeds=range(60))


async def one_actor(
    cluster: ra.Cluster, **launch: Any
) -> tuple[Channels, ra.WorkerGroup[ToyActor]]:
    ToyTrainer.made.clear()
    return Channels(cluster), await cluster.launch(ToyActor, None, backend="toy", **launch)


def test_early_trajectories_wait_for_their_turn() -> None:
    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            channels, actors = await one_actor(cluster)
            plan = plan_of(3, env_workers=1, staleness=2)
            training = asyncio.create_task(channels.train(actors, plan))
            for iteration in (2, 0, 1):
                for stage in (1, 0):
                    await channels.trajectories.sender.put(
                        trajectory(iteration, stage=stage), key=0
                    )
            await training
        [trainer] = ToyTrainer.made
        assert trainer.trained == [[(at, 0, 0), (at, 0, 1)] for at in range(3)]

    explore(main, seeds=range(40))


def test_a_report_tells_of_the_iteration_and_its_episodes() -> None:
    plan = plan_of(2, env_workers=2)
    first, second = run(run_workers(plan, env_workers=2))
    assert (first.iteration, first.version, first.metrics) == (0, 1, {"loss": 1.0})
    assert (second.iteration, second.version, second.metrics) == (1, 2, {"loss": 2.0})
    assert first.episode_return == [0.0, 0.0, 1.0, 1.0]
    assert first.episode_length == [STEPS] * 4
    assert first.episode_success == [True] * 4


@pytest.mark.parametrize("version", [0, 2])
def test_steps_older_than_allowed_or_newer_than_the_actor_are_an_error(version: int) -> None:
    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            channels, actors = await one_actor(cluster)
            training = asyncio.create_task(channels.train(actors, plan_of(2, env_workers=1)))
            for iteration, acted in ((0, 0), (1, version)):
                for stage in range(STAGES):
                    await channels.trajectories.sender.put(
                        trajectory(iteration, stage=stage, version=acted), key=0
                    )
            await training

    with pytest.raises(ra.WorkerError, match=r"trained at version 1 .* max_staleness is 0"):
        run(main())


def test_a_resumed_actor_publishes_where_it_was_and_trains_only_the_rest(tmp_path: Path) -> None:
    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            channels, actors = await one_actor(cluster, resume=str(tmp_path / "version-3"))
            assert await actors.call(ToyActor.version) == [3]
            training = asyncio.create_task(channels.train(actors, plan_of(4, env_workers=1)))
            assert (await channels.weights.receiver.get()).version == 3
            for stage in range(STAGES):
                late = trajectory(2, stage=stage, version=2)  # trained before: left out
                await channels.trajectories.sender.put(late, key=0)
                made = trajectory(3, stage=stage, version=3)
                await channels.trajectories.sender.put(made, key=0)
            [report] = await training
            assert report.version == 4
        [trainer] = ToyTrainer.made
        assert trainer.trained == [[(3, 0, 0), (3, 0, 1)]]
        assert report.duplicates == STAGES

    explore(main, seeds=range(40))


def test_a_run_that_is_complete_only_publishes(tmp_path: Path) -> None:
    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            channels, actors = await one_actor(cluster, resume=str(tmp_path / "version-9"))
            assert await channels.train(actors, plan_of(4, env_workers=1)) == []
            assert (await channels.weights.receiver.get()).version == 9

    run(main())
