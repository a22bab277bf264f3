"""Real actors in their processes: the number of those that train changes between iterations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rlinf_async as ra
from rlinf_async.backends.language import LanguageTrainer
from rlinf_async.messages.embodied import TrainReport
from rlinf_async.parallel import FSDP1, Strategy
from rlinf_async.workers.actor import (
    AppliedStrategy,
    EmbodiedFSDPActor,
    FSDPActor,
    LanguageBatches,
)
from tests.backends.rescale.kit import (
    RING,
    TRAJECTORIES,
    embodied_config,
    language_config,
    mean_over_ranks,
    trajectory,
)
from tests.workers.actor.language.kit import Channels as LanguageChannels
from tests.workers.actor.language.kit import groups
from tests.workers.actor.toy import Channels, Plan

GROUPS = 24
BATCHES = LanguageBatches(
    samples=GROUPS * 4, group_size=4, optimizer_steps=2, max_tokens_per_micro_batch=64
)
ITERATIONS = 2 * len(RING)
"""of 2 optimizer steps each: 20 in all"""
FEWER = (1, 2, 3, 1)
"""how many ranks of an embodied actor train; `tests/backends/rescale` has more of them"""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
Row = list[float]


class BrokenOnce(FSDPActor):
    """Its first move to 3 ranks fails on rank 1."""

    def make_trainer(self) -> LanguageTrainer:
        from rlinf_async.backends.rescale.rescale import Rescale

        whole = Rescale.move

        def move(attempt: Rescale) -> None:
            if attempt.new.dp == 3 and self.rank == 1:
                setattr(Rescale, "move", whole)  # noqa: B010
                raise OSError("as the test wants it")
            whole(attempt)

        setattr(Rescale, "move", move)  # noqa: B010
        return super().make_trainer()


async def language_alone() -> list[Row]:
    async with ra.Cluster.local() as cluster:
        channels = LanguageChannels(cluster)
        actor = await cluster.launch(FSDPActor, language_config(), BATCHES)
        rows = []
        # A call closes its ends: this one keeps the channel from ending between two of them.
        kept = channels.groups.receiver.clone()
        for iteration in range(ITERATIONS):
            await channels.send(groups(iteration, count=GROUPS, version=iteration))
            [report] = await actor.call(FSDPActor.run_training, channels.groups.receiver)
            rows.append(_numbers(report.metrics))
        kept.close()
        return rows


def _numbers(metrics: dict[str, float]) -> Row:
    return [metrics[name] for name in ("loss", "entropy", "grad_norm", "lr")]


async def language_on_the_ring() -> list[Row]:
    """Two iterations on each number of ranks, collected and pipelined by turns."""
    async with ra.Cluster.process() as cluster:
        channels = LanguageChannels(cluster)
        actors = await cluster.launch(
            BrokenOnce,
            language_config(),
            BATCHES,
            count=4,
            collective="gloo",
            env_vars=ONE_THREAD,
        )
        with pytest.raises(ra.WorkerError, match="call init_trainer_resharding"):
            await actors.call(FSDPActor.apply_parallel_strategy, Strategy(dp=2))
        assert await actors.call(FSDPActor.init_trainer_resharding, RING[0]) == [[1, 2, 3, 4]] * 4
        rows: list[Row] = []
        kept = channels.groups.receiver.clone()
        for size in RING:
            if size == 3:
                with pytest.raises(ra.WorkerError, match="OSError: as the test wants it"):
                    await actors.call(FSDPActor.apply_parallel_strategy, Strategy(dp=size))
                assert [one.dp for one in await actors.call(FSDPActor.strategy)] == [4] * 4
            applied = await actors.call(FSDPActor.apply_parallel_strategy, Strategy(dp=size))
            assert [one.active for one in applied] == [rank < size for rank in range(4)]
            assert {one.strategy.dp for one in applied} == {size}
            for run in (FSDPActor.run_training, FSDPActor.run_training_pipeline):
                iteration = len(rows)
                await channels.send(groups(iteration, count=GROUPS, version=iteration), size)
                reports = await actors.call(run, channels.groups.receiver)
                assert [one.samples for one in reports] == [
                    BATCHES.samples // size if rank < size else 0 for rank in range(4)
                ]
                assert {(one.version, one.ranks) for one in reports} == {(iteration + 1, size)}
                rows.append(_numbers(reports[0].metrics))
            versions = await actors.call(FSDPActor.sync_model_to_rollout, channels.weights.sender)
            assert versions == [len(rows)] * 4
        kept.close()
        await refused(actors)
        return rows


async def refused(actors: Any) -> None:
    """One of four ranks trains; nothing that is wrong changes that."""
    for strategy, text in (
        (Strategy(dp=2, tp=2), "tp=2: FSDP shards over dp alone, so tp must be 1"),
        (Strategy(pp=2, cp=2), "pp=2: .*; cp=2: "),
        (Strategy(dp=2, sharding=FSDP1()), "sharding=.*only FSDP2.. can change while it trains"),
        (Strategy(dp=5), "dp=5: only 4 ranks were launched"),
    ):
        with pytest.raises(ra.WorkerError, match=f"StrategyError: {text}"):
            await actors.call(FSDPActor.apply_parallel_strategy, strategy)
    assert [one.dp for one in await actors.call(FSDPActor.strategy)] == [1] * 4


@pytest.mark.parametrize("loop_kind", ["uvloop"])
async def test_a_language_actor_on_1_2_4_3_1_ranks_has_the_losses_of_one(
    loop_kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, found = await language_alone(), await language_on_the_ring()
    difference = (torch.tensor(found) - torch.tensor(expected)).abs()
    with capsys.disabled():
        worst = difference.max(0).values.tolist()
        print(f"\nFSDPActor: loss, entropy, grad norm, lr differ by at most {worst}", end="")
    assert difference[:, 0].max() < 1e-6
    assert difference[:, 3].max() == 0.0


async def embodied(ranks: int, ring: tuple[int, ...]) -> tuple[list[Row], list[int]]:
    """Losses of each iteration, and how many ranks trained it; strategies are asked for while the
    actors train."""
    async with ra.Cluster.process() if ranks > 1 else ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(
            EmbodiedFSDPActor,
            embodied_config(ranks),
            count=ranks,
            collective="gloo" if ranks > 1 else None,
            env_vars=ONE_THREAD,
        )
        size = ring[0]
        await actors.call(EmbodiedFSDPActor.init_trainer_resharding, size)
        iterations = 2 * len(FEWER)
        plan = Plan(iterations, trajectories=TRAJECTORIES)
        kept = channels.trajectories.receiver.clone()
        wanted = list(ring[1:])
        rows, sizes = [], []
        for iteration in range(iterations):
            training = channels.iteration(actors, plan)
            asking: ra.GroupCall[list[AppliedStrategy]] | None = None
            if iteration % 2 and wanted:
                strategy = Strategy(dp=wanted.pop(0))
                asking = actors.call(EmbodiedFSDPActor.apply_parallel_strategy, strategy)
                await actors.call(EmbodiedFSDPActor.strategy)  # answered after all were asked
            for stage in range(TRAJECTORIES):
                made = trajectory(iteration, stage)
                await channels.trajectories.sender.put(made, key=stage % size)
            reports = await training
            rows.append(_losses(reports))
            sizes.append(size)
            [size] = {report.ranks for report in reports}
            if asking is not None:
                await asking
        kept.close()
        assert await actors.call(EmbodiedFSDPActor.version) == [iterations] * ranks
        return rows, sizes


def _losses(reports: list[TrainReport]) -> Row:
    names = ("policy_loss", "value_loss", "grad_norm")
    return mean_over_ranks(
        [[one.metrics[name] for name in names] for one in reports if one.metrics]
    )


@pytest.mark.parametrize("loop_kind", ["uvloop"])
async def test_an_embodied_actor_changes_at_the_end_of_an_iteration_and_keeps_its_losses(
    loop_kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, _ = await embodied(1, (1,))
    found, sizes = await embodied(3, FEWER)
    difference = (torch.tensor(found) - torch.tensor(expected)).abs()
    with capsys.disabled():
        worst = difference.max(0).values.tolist()
        print(
            f"\nEmbodiedFSDPActor on {sizes} ranks: losses, norm differ by at most {worst}", end=""
        )
    assert sizes == [size for size in FEWER for _ in range(2)]
    assert difference[:, :2].max() < 1e-6
