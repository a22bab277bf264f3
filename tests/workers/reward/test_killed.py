"""A reward worker that is killed in the middle of scoring loses no sample and leaves nobody."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import rlinf_async as ra
from rlinf_async.channels.queue import statistics_of
from rlinf_async.messages.language import Outcome, Scored
from rlinf_async.workers.reward import RewardConfig, RewardWorker
from tests.jobs.processes import processes, until
from tests.workers.reward.kit import Channels, custom, sample


@pytest.mark.slow
async def test_a_killed_reward_worker_loses_no_sample_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    held, released = tmp_path / "pid", tmp_path / "released"
    async with ra.Cluster.process() as cluster:
        channels = Channels(cluster)
        config = RewardConfig(processes=2, time_limit=60.0)
        rewards = await cluster.launch(RewardWorker, config, restart=ra.Restart(max=1))
        running = channels.start(rewards)
        await channels.put(custom(0, "waits_for_file", released))
        await channels.put(custom(1, "says_pid_and_hangs_once", held))
        await channels.put(*(sample(at) for at in range(2, 10)))
        await asyncio.to_thread(until, held.exists, "the verifier runs")
        worker, scorer = cluster.pid("RewardWorker[0]"), int(held.read_text())
        assert worker is not None
        os.kill(worker, signal.SIGKILL)
        await asyncio.to_thread(
            until, lambda: not any(one.pid == scorer for one in processes()), "no process is left"
        )
        released.touch()
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < 10:
            scored = await channels.next()  # some may come twice: put, but not yet acknowledged
            outcomes[scored.sample.request.group] = scored.outcome
        assert outcomes == {at: Scored(reward=1.0) for at in range(10)}
        channels.samples.close()
        await running
        assert rewards.restarts == 1
        seen = statistics_of(channels.samples.queue)
        assert (seen.depth, seen.leases_out) == (0, 0)
