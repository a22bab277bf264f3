"""Strategies after one that a rank was not ready for, and after a second preparation."""

from __future__ import annotations

import pytest

import rlinf_async as ra
from rlinf_async.parallel import Strategy
from rlinf_async.workers.actor import FSDPActor, LanguageTrainingPlan
from tests.backends.rescale.kit import LIMIT, language_config
from tests.workers.actor.language.kit import BATCHES, Channels, groups

pytestmark = pytest.mark.timeout(300)  # processes that import torch, on a busy machine


class NotReadyOnce(FSDPActor):
    """Rank 1 cannot take its model back the first time that it is asked to change."""

    ready = False

    async def make_ready(self) -> None:
        if self.rank == 1 and not self.ready:
            self.ready = True
            raise OSError("no room on the device")
        await super().make_ready()


@pytest.mark.parametrize("loop_kind", ["uvloop"])
async def test_strategies_go_on_after_a_rank_that_was_not_ready_and_a_second_preparation(
    loop_kind: str,
) -> None:
    async with ra.Cluster.process() as cluster:
        channels = Channels(cluster)
        kept = channels.groups.receiver.clone()
        actors = await cluster.launch(
            NotReadyOnce,
            language_config(),
            BATCHES,
            count=2,
            collective="gloo",
            env_vars={"OMP_NUM_THREADS": "1"},
        )

        async def sizes() -> list[int]:
            return [one.dp for one in await actors.call(FSDPActor.strategy)]

        await actors.call(FSDPActor.init_trainer_resharding, timeout=LIMIT)
        with pytest.raises(ra.WorkerError, match="OSError: no room on the device"):
            await actors.call(FSDPActor.apply_parallel_strategy, Strategy(dp=1))
        assert await sizes() == [2, 2]
        await actors.call(FSDPActor.apply_parallel_strategy, Strategy(dp=1))
        await channels.send(groups(0), 1)
        await actors.call(FSDPActor.run_training, channels.groups.receiver)

        # One rank trains: this brings the other one back, though both were launched.
        await actors.call(FSDPActor.init_trainer_resharding, 2, timeout=LIMIT)
        assert await sizes() == [2, 2]
        training = actors.call(
            FSDPActor.train,
            LanguageTrainingPlan(iterations=3),
            channels.groups.receiver,
            channels.weights.sender,
            channels.reports.sender,
        )
        with pytest.raises(ra.WorkerError, match="trains or changes its ranks"):
            await actors.call(FSDPActor.init_trainer_resharding, 2)
        asked = actors.call(FSDPActor.apply_parallel_strategy, Strategy(dp=1))
        await channels.send(groups(1, version=1), 2)
        reports = [await channels.reports.receiver.get() for _ in range(2)]
        assert [one.ranks for one in reports] == [1, 1]
        await channels.send(groups(2, version=2), 1)
        reports = [await channels.reports.receiver.get() for _ in range(2)]
        assert sorted(one.samples for one in reports) == [0, BATCHES.samples]
        assert await training == [3, 3]
        assert [one.old_dp for one in await asked] == [2, 2]
        kept.close()
