"""The scheduler over toy backends: devices follow the work, and nothing is lost or doubled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import pytest

import rlinf_async as ra
from rlinf_async.backends.language import MicroBatch
from rlinf_async.backends.toy.trainer import ToyTrainer
from rlinf_async.deadlines import let_pass
from rlinf_async.testing import explore
from tests.workers.scheduler.explore import trained_once
from tests.workers.scheduler.kit import BATCHES, CONFIG, MINI_BATCHES, WIDE, Run
from tests.workers.scheduler.registered import registered


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


class Late(ToyTrainer):
    """Other ranks than 0 take far longer: rank 0 is whole mini-batches ahead. No all-reduce has
    them wait for one another."""

    def training_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        found = super().training_step(micro_batches)
        let_pass(100.0 * self._rank)
        return found


@pytest.mark.parametrize("policy", ["tail", "greedy", "turns"])
def test_a_rank_that_is_behind_trains_what_was_given_to_it(policy: str) -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            config = msgspec.structs.replace(CONFIG, policy=policy, change_seconds=1000.0)
            run = Run(cluster, site=WIDE, config=config, guest=policy == "turns")
            await run.start()
            ran = await run.train(2)
        trained_once(ran, 2, WIDE)

    with registered("toy", Late):
        explore(body, seeds=range(3))
