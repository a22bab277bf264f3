"""Stages in threads of their own."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import rlinf_async as ra
from rlinf_async.messages.embodied import Collect, Trajectory
from rlinf_async.workers.env import EnvConfig, EnvWorker
from tests.workers.env.toy import MAKE, Channels, Counting, ToyRollout, weights


class Meeting(Counting):
    """Its steps wait until those of all four environments are under way."""

    barrier = threading.Barrier(4)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.barrier.wait(60)
        return super().step(action)


async def collected(config: EnvConfig) -> list[Trajectory]:
    """Two iterations of five steps, in the order of iteration and stage."""
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        envs = await cluster.launch(EnvWorker, config)
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
        await channels.issue(Collect(iteration=n, steps=5, min_version=0) for n in range(2))
        await collecting
        await serving
        return sorted(channels.collected(), key=lambda one: (one.iteration, one.stage))


async def test_parallel_stages_step_at_the_same_time_and_record_the_same() -> None:
    meeting = EnvConfig(
        entry_point="tests.workers.env.test_parallel:Meeting", envs=4, stages=4, parallel=True
    )
    together = await collected(meeting)
    one_by_one = await collected(EnvConfig(entry_point=MAKE, envs=4, stages=4))
    assert len(together) == 8
    for got, wanted in zip(together, one_by_one, strict=True):
        np.testing.assert_array_equal(got.observation, wanted.observation)
        np.testing.assert_array_equal(got.reward, wanted.reward)
        np.testing.assert_array_equal(got.truncated, wanted.truncated)
