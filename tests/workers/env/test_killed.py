"""Workers that are killed in the middle, in processes of their own."""

from __future__ import annotations

import os
import signal

import pytest

import rlinf_async as ra
from rlinf_async.messages.embodied import Collect
from rlinf_async.workers.env import EnvWorker
from tests.workers.env.test_collect import same, serve, start
from tests.workers.env.toy import Channels, ToyRollout, by_hand, counting, weights

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
