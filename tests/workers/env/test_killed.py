"""Workers that are killed in the middle, in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import rlinf_async as ra
from rlinf_async.messages.embodied import Collect
from rlinf_async.workers.env import EnvConfig, EnvWorker, EvaluationPlan
from rlinf_async.workers.env.config import episode_seed
from tests.workers.env.test_collect import same, serve, start
from tests.workers.env.toy import Channels, ChoosingRollout, ToyRollout, by_hand, counting, weights

ITERATIONS = 60


@pytest.mark.slow
async def test_killed_workers_lose_no_ticket_and_change_no_step_of_the_others() -> None:
    tickets = [Collect(iteration=n, steps=20, min_version=0) for n in range(ITERATIONS)]
    restart = ra.Restart(max=1)
    async with ra.Cluster.process() as cluster:
        # So few that the workers are still at it when it is their turn to be killed.
        channels = Channels(cluster, ahead=8)
        envs = await cluster.launch(EnvWorker, counting(), count=2, restart=restart)
        rollout = await cluster.launch(ToyRollout, None, count=1, restart=restart)
        await channels.weights.sender.publish(weights(1))
        collecting = start(envs, channels)
        serving = serve(rollout, channels)
        await channels.issue(tickets, ranks=2)
        made = {}
        for arrived in range(4 * ITERATIONS):
            if arrived == 20:
                _kill(cluster, "EnvWorker[0]")
            if arrived == 60:
                _kill(cluster, "ToyRollout[0]")
            one = await channels.trajectories.receiver.get(key=0)
            made[one.iteration, one.env_rank, one.stage] = one
        await collecting
        [report] = await serving
        for one in channels.collected():  # second ones, of the ticket that was given up
            made[one.iteration, one.env_rank, one.stage] = one
        assert len(made) == 4 * ITERATIONS
        assert (envs.restarts, rollout.restarts) == (1, 1)
        assert report.version == 1
        for rank, lives in ((0, 1), (1, 0)):  # another life, as each trajectory says
            assert {made[ITERATIONS - 1, rank, stage].incarnation for stage in (0, 1)} == {lives}
        for stage in range(2):  # rank 1 was not killed
            for iteration, values in enumerate(by_hand(1, tickets, version=1)):
                same(made[iteration, 1, stage], values)


def _kill(cluster: ra.Cluster, name: str) -> None:
    pid = cluster.pid(name)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("simulator", "fault"), [("single", "exits"), ("pool", "killed")])
async def test_an_episode_of_an_evaluation_that_ends_its_process_fails_once_and_is_not_tried_again(
    tmp_path: Path, simulator: Any, fault: str
) -> None:
    once = str(tmp_path / "once") if fault == "killed" else ""
    config = EnvConfig(
        entry_point="tests.workers.env.failing:Failing",
        kwargs={"where": "step", "fault": fault, "once": once, "seed": episode_seed(7, 2)},
        simulator=simulator,
        envs=2,
        stages=1,
    )
    async with ra.Cluster.process() as cluster:
        channels = Channels(cluster)
        envs, rollout = await asyncio.gather(
            cluster.launch(EnvWorker, config, restart=ra.Restart(max=1)),
            cluster.launch(ChoosingRollout, None),
        )
        with channels.observations.sender, channels.actions.receiver:
            serving = serve(rollout, channels)
            await channels.weights.sender.publish(weights(4))
            evaluated = await envs.call(
                EnvWorker.evaluate,
                EvaluationPlan(episodes=4, seed=7),
                channels.observations.sender,
                channels.actions.receiver,
            )
            [supervisor] = envs.supervisors
        await serving
    played = {one.episode: (one.failed, one.length, one.success) for one in evaluated[0]}
    ended = (False, 8, True)
    # Nobody knows whether the environment is to blame for a kill from outside: it plays again.
    second = (True, 0, None) if fault == "exits" else ended
    assert played == {0: ended, 1: ended, 2: second, 3: ended}
    assert (supervisor.restarts, supervisor.failed_episodes) == (1, 1)
    assert "Failing" in supervisor.last_failure
    assert f"seed {episode_seed(7, 2)}, in step()" in supervisor.last_failure


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (1.0, "has not returned for env.reset_seconds = 1; it was about to stop"),
        (None, "EnvWorker[0] did not stop within 1.0 s and is killed; under way was env "),
    ],
)
async def test_an_environment_that_does_not_close_is_named_and_ends_nothing_else(
    caplog: pytest.LogCaptureFixture, limit: float | None, said: str
) -> None:
    config = EnvConfig(
        entry_point="tests.workers.env.failing:Failing",
        kwargs={"where": "close", "fault": "deaf"},
        envs=1,
        stages=1,
        reset_seconds=limit,
    )
    async with ra.Cluster.process(grace=1.0 if limit is None else 60.0) as cluster:
        await cluster.launch(EnvWorker, config)
    assert said in caplog.text
    assert "Failing[0], seed " in caplog.text
    assert "in close() at step 0 of its life" in caplog.text
