"""The actor lends its own device to a rollout worker, and takes it back."""

from __future__ import annotations

import msgspec
import pytest

import rlinf_async as ra
from rlinf_async.testing import explore
from tests.workers.scheduler.explore import Devices, Failing, trained_once
from tests.workers.scheduler.kit import CONFIG, Run
from tests.workers.scheduler.registered import registered

ITERATIONS = 2


@pytest.mark.parametrize("policy", ["tail", "turns"])
def test_rollout_borrows_the_actors_device_in_each_iteration(policy: str) -> None:
    async def body() -> None:
        Failing.seed, Failing.held = None, Devices()
        async with ra.Cluster.local() as cluster:
            config = msgspec.structs.replace(CONFIG, policy=policy)
            run = Run(cluster, config=config, guest=True)
            await run.start()
            ran = await run.train(ITERATIONS)
        trained_once(ran, ITERATIONS)
        assert set(ran.samples.values()) == {1}
        assert ran.summary is not None
        assert ran.summary.lent == ITERATIONS
        assert ran.summary.stopped >= ITERATIONS
        assert ran.summary.unanswered == ran.summary.failed == 0
        assert not Failing.held.lent
        assert not Failing.held.wrong

    with registered("toy", Failing):
        explore(body, seeds=range(4))
