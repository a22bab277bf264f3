"""A Megatron actor in its processes: its strategy changes between iterations, and while one is
trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rlinf_async as ra
from rlinf_async.parallel import Strategy
from rlinf_async.workers.actor import LanguageBatches, MegatronActor
from tests.backends.megatron.rescaling import config
from tests.workers.actor.language.kit import Channels, groups

pytest.importorskip("megatron.core")

BATCHES = LanguageBatches(samples=16, group_size=4, optimizer_steps=2, micro_batch_size=4)
RING = (Strategy(tp=2), Strategy(dp=2), Strategy(pp=2), Strategy())
METRICS = ("loss", "entropy", "grad_norm", "lr")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
Row = list[float]


async def trained(
    channels: Channels, actors: ra.WorkerGroup[MegatronActor], ring: tuple[Strategy, ...], to: Path
) -> list[Row]:
    """Train an iteration on each strategy; the next one is asked for while it trains."""
    rows: list[Row] = []
    with channels.groups.receiver.clone():
        for at in range(len(RING)):
            now, then = ring[min(at, len(ring) - 1)], ring[min(at + 1, len(ring) - 1)]
            training = actors.call(MegatronActor.run_training, channels.groups.receiver)
            changes = then != now
            asking = actors.call(MegatronActor.apply_parallel_strategy, then) if changes else None
            await actors.call(MegatronActor.strategy)  # answered after all were asked
            await channels.send(groups(at, version=at), now.dp)
            reports = await training
            assert sum(one.samples for one in reports) == BATCHES.samples
            assert {(one.version, one.ranks) for one in reports} == {(at + 1, then.dp)}
            rows.append([reports[0].metrics[name] for name in METRICS])
            if asking is not None:
                applied = await asking
                assert {(one.old_strategy, one.strategy) for one in applied} == {(now, then)}
                assert [one.active for one in applied] == [
                    rank < then.world_size for rank in range(len(applied))
                ]
            versions = await actors.call(
                MegatronActor.sync_model_to_rollout, channels.weights.sender
            )
            assert set(versions) == {at + 1}
    await actors.call(MegatronActor.begin_checkpoint, str(to))
    await actors.call(MegatronActor.checkpoint_written)
    return rows


async def test_an_actor_on_tp2_dp2_pp2_and_one_rank_has_the_losses_of_one(tmp_path: Path) -> None:
    async with ra.Cluster.process() as cluster:
        channels = Channels(cluster)
        trainer = config("tied", sequence_parallel=False)
        settings: dict[str, Any] = {"env_vars": ONE_THREAD}
        actors = await cluster.launch(
            MegatronActor, trainer, BATCHES, count=2, collective="gloo", **settings
        )
        assert await actors.call(MegatronActor.init_trainer_resharding) == [[1]] * 2
        assert set(await actors.call(MegatronActor.strategy)) == {RING[0]}
        with pytest.raises(ra.WorkerError, match="tp=2 x pp=2 x dp=1: only 2 ranks were launched"):
            await actors.call(MegatronActor.apply_parallel_strategy, Strategy(tp=2, pp=2))
        found = await trained(channels, actors, RING, tmp_path / "changed")
        alone = await cluster.launch(
            MegatronActor, config("tied", tp=1), BATCHES, name="alone", **settings
        )
        expected = await trained(channels, alone, (Strategy(),), tmp_path / "alone")
    difference = (torch.tensor(found) - torch.tensor(expected)).abs()
    assert difference[:, 0].max() < 1e-5
    assert difference[:, 3].max() == 0.0
