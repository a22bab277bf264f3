"""The scheduler over toy backends: devices follow the work, and nothing is lost or doubled."""

from __future__ import annotations

import rlinf_async as ra
from rlinf_async.testing import explore
from tests.workers.scheduler.kit import BATCHES, MINI_BATCHES, Run


def test_the_actor_grows_into_a_rollout_workers_device_and_shrinks_again() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            run = Run(cluster)
            await run.start()
            ran = await run.train(3)
        assert len(ran.samples) == 3 * BATCHES.samples
        assert set(ran.samples.values()) == {1}
        assert ran.summary is not None
        assert ran.summary.decisions == 3 * (MINI_BATCHES + 1)
        assert ran.summary.stopped == 3
        assert ran.summary.changes == 6
        assert ran.summary.unanswered == ran.summary.failed == 0
        for reports in ran.reports:
            assert sum(one.samples for one in reports) == BATCHES.samples
            assert reports[1].samples > 0
            assert reports[0].ranks == 1

    explore(body, seeds=range(3))
