"""Trajectories of an iteration that the ranks cannot share are refused, whenever that is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import rlinf_async as ra
from rlinf_async.backends import parts
from rlinf_async.backends.base import RescaleReport
from rlinf_async.parallel import Strategy
from tests.workers.actor.toy import Channels, Plan, ToyActor, ToyTrainer, nothing_moved

THREE = Plan(1, trajectories=3)


class RescalableToy(ToyTrainer):
    """Changes its ranks by doing nothing; any number of them shares a minibatch."""

    strategy = Strategy(dp=2)

    def check_strategy(self, strategy: Strategy, /) -> None:
        pass

    def rescale(
        self, strategy: Strategy, *, timeout: float, bucket_bytes: int, objection: str = ""
    ) -> RescaleReport:
        return nothing_moved(2, strategy.dp, active=self.rank < strategy.dp)

    def skip_iteration(self) -> None:
        self.version += 1


@pytest.fixture(autouse=True)
def toy_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(parts.trainers.paths, "toy", f"{__name__}:RescalableToy")
    yield
    ToyTrainer.made.clear()


async def test_ranks_that_do_not_divide_the_trajectories_do_not_begin_to_train() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(ToyActor, None, backend="toy", count=2)
        with pytest.raises(ra.WorkerError, match=r"dp=2 does not divide 3 trajectories.*: \[1\]"):
            await channels.iteration(actors, THREE)


async def test_a_size_that_was_valid_before_the_trajectories_were_known_is_refused_then() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(ToyActor, None, backend="toy", count=2)
        assert await actors.call(ToyActor.init_trainer_resharding, 1) == [[1, 2]] * 2
        training = channels.iteration(actors, THREE)
        await actors.call(ToyActor.strategy)  # answered after training was asked for
        with pytest.raises(ra.WorkerError, match=r"dp=2 does not divide 3 trajectories.*: \[1\]"):
            await actors.call(ToyActor.apply_parallel_strategy, Strategy(dp=2))
        training.cancel()
