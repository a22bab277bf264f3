"""Strategies after one that a rank was not ready for, after a second preparation, and after one of
which a rank cannot know what came of it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

import rlinf_async as ra
from rlinf_async.backends.language import LanguageTrainer
from rlinf_async.parallel import Strategy
from rlinf_async.workers.actor import FSDPActor
from tests.backends.rescale.kit import LIMIT, language_config
from tests.workers.actor.language.kit import BATCHES, Channels, groups


class StoreGone:
    """A store whose server has ended."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer")


class Failing(FSDPActor):
    """Rank 1 cannot take its model back the first time that it is asked to change; later it loses
    the store, when it is told to."""

    ready = False
    reaches_the_store = True

    async def make_ready(self) -> None:
        if self.rank == 1 and not self.ready:
            self.ready = True
            raise OSError("no room on the device")
        await super().make_ready()

    def make_trainer(self) -> LanguageTrainer:
        from rlinf_async.backends.rescale.rescale import Rescale

        whole = Rescale.decide

        def decide(attempt: Rescale) -> None:
            if self.rank == 1 and not self.reaches_the_store:
                attempt._transaction._store = cast(Any, StoreGone())
            whole(attempt)

        setattr(Rescale, "decide", decide)  # noqa: B010
        return super().make_trainer()

    async def lose_the_store(self) -> None:
        """As soon as this rank is ready for another strategy."""
        self.reaches_the_store = False


@pytest.mark.parametrize("loop_kind", ["uvloop"])
async def test_strategies_go_on_after_failures_until_a_rank_cannot_know_which_is_in_force(
    loop_kind: str,
) -> None:
    async with ra.Cluster.process() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(
            Failing,
            language_config(),
            BATCHES,
            count=2,
            collective="gloo",
            env_vars={"OMP_NUM_THREADS": "1"},
        )
        await actors.call(FSDPActor.init_trainer_resharding, timeout=LIMIT)
        with channels.groups.receiver.clone():
            await a_rank_is_not_ready_and_then_prepared_again(actors, channels)
            await a_rank_cannot_know_the_strategy(actors, channels)


async def a_rank_is_not_ready_and_then_prepared_again(
    actors: ra.WorkerGroup[Failing], channels: Channels
) -> None:
    async def sizes() -> list[int]:
        return [one.dp for one in await actors.call(FSDPActor.strategy)]

    with pytest.raises(ra.WorkerError, match="OSError: no room on the device"):
        await actors.call(FSDPActor.apply_parallel_strategy, Strategy(dp=1))
    assert await sizes() == [2, 2]
    await actors.call(FSDPActor.apply_parallel_strategy, Strategy(dp=1))
    await channels.send(groups(0), 1)
    await actors.call(FSDPActor.run_training, channels.groups.receiver)

    # One rank trains: this brings the other one back, though both were launched.
    await actors.call(FSDPActor.init_trainer_resharding, 2, timeout=LIMIT)
    assert await sizes() == [2, 2]
    training = actors.call(FSDPActor.run_training, channels.groups.receiver)
    with pytest.raises(ra.WorkerError, match="trains or changes its ranks"):
        await actors.call(FSDPActor.init_trainer_resharding, 2)
    asked = actors.call(FSDPActor.apply_parallel_strategy, Strategy(dp=1))
    assert await sizes() == [2, 2]  # answered after all were asked, while they still train
    await channels.send(groups(1, version=1), 2)
    assert [one.ranks for one in await training] == [1, 1]
    await channels.send(groups(2, version=2), 1)
    reports = await actors.call(FSDPActor.run_training, channels.groups.receiver)
    assert sorted(one.samples for one in reports) == [0, BATCHES.samples]
    assert await actors.call(FSDPActor.version) == [3, 3]
    assert [one.old_strategy.dp for one in await asked] == [2, 2]


async def a_rank_cannot_know_the_strategy(
    actors: ra.WorkerGroup[Failing], channels: Channels
) -> None:
    """Training ends at once there."""
    await actors.call(FSDPActor.init_trainer_resharding, 2, timeout=LIMIT)
    await actors.call(Failing.lose_the_store)
    training = actors.call(FSDPActor.run_training, channels.groups.receiver)
    asked = actors.call(FSDPActor.apply_parallel_strategy, Strategy(dp=1))
    await actors.call(FSDPActor.strategy)  # answered after all were asked
    await channels.send(groups(3, version=3), 2)
    said = await asyncio.gather(training, asked, return_exceptions=True)
    for one, method in zip(said, ("run_training", "apply_parallel_strategy"), strict=True):
        assert isinstance(one, ra.WorkerError)
        assert f"Failing[1] failed in {method} " in str(one)
        assert "RescaleUndecided: rank 1 was ready for dp=1" in str(one)
