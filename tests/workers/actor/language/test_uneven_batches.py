"""Numbers of ranks that cannot share a language actor's mini-batch are refused by name."""

from __future__ import annotations

from typing import Any, cast

import pytest

import rlinf_async as ra
from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.language import LanguageTrainer
from rlinf_async.parallel import DataRank, Strategy
from rlinf_async.workers.actor import FSDPActor, LanguageBatches
from tests.workers.actor.toy import nothing_moved

BATCHES = LanguageBatches(samples=32, group_size=4, optimizer_steps=2)
"""mini-batches of 16 samples: 4 groups"""
UNEVEN = "dp=3 x group_size=4 does not divide a mini-batch of 16 samples; nearest that does: 2 or 4"


class Trainer:
    """Changes its ranks by doing nothing."""

    data_rank = DataRank(0, 4)

    strategy = Strategy(dp=4)

    def check_strategy(self, strategy: Strategy, /) -> None:
        pass

    def rescale(self, strategy: Strategy, **_: Any) -> RescaleReport:
        return nothing_moved(4, strategy.dp)

    def skip_iteration(self) -> None:
        pass


class Actor(FSDPActor):
    """An actor without a model."""

    async def join_collective(self) -> None:
        pass

    def make_trainer(self) -> LanguageTrainer:
        return cast(LanguageTrainer, Trainer())


async def test_sizes_that_do_not_divide_or_were_not_launched_are_named_and_change_nothing() -> None:
    async with ra.Cluster.local() as cluster:
        actors = await cluster.launch(Actor, None, BATCHES, count=4)
        for first, text in (
            (3, UNEVEN),
            (5, "dp=5: only 4 ranks were launched"),
            (0, "dp=0 must be at least 1"),
        ):
            with pytest.raises(ra.WorkerError, match=text):
                await actors.call(Actor.init_trainer_resharding, first)
        assert await actors.call(Actor.init_trainer_resharding) == [[1, 2, 4]] * 4
        for dp, text in ((3, UNEVEN), (5, "dp=5: only 4 ranks were launched")):
            with pytest.raises(ra.WorkerError, match=text):
                await actors.call(Actor.apply_parallel_strategy, Strategy(dp=dp))
        assert [one.dp for one in await actors.call(Actor.strategy)] == [4] * 4
        await actors.call(Actor.apply_parallel_strategy, Strategy(dp=2))
        assert [one.dp for one in await actors.call(Actor.strategy)] == [2] * 4
