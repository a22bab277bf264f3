"""A training group of two ranks: its numbers are those of our actor, whatever happens between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import rlinf_async as ra
from rlinf_async.messages.language import LanguageTrainReport, SampleGroup
from rlinf_async.runtime.ray.training import (
    RayTrainGroup,
    RolloutDataError,
    TrainArgs,
    create_placement_group,
)
from rlinf_async.runtime.ray.training.args import batches, trainer_config
from rlinf_async.workers.actor import FSDPActor
from rlinf_async.workers.base import BuildError
from tests.runtime.ray.training.kit import GROUP, args, batch, columns

pytestmark = pytest.mark.xdist_group("ray")

TOLERANCE = 1e-6
METRICS = ("loss", "grad_norm", "entropy", "ratio", "tokens")


def our_actor(given: TrainArgs, rollouts: int) -> list[LanguageTrainReport]:
    """The same rollouts, trained by our actor in one process."""

    async def train() -> list[LanguageTrainReport]:
        config = trainer_config(given, critic=False, reference=False, device="cpu")
        async with ra.Cluster.local() as cluster:
            groups = cluster.channel(SampleGroup, name="groups", capacity=64)
            actors = await cluster.launch(FSDPActor, config, batches(given))
            reports = []
            with groups.receiver.clone("between two calls"):
                for rollout in range(rollouts):
                    found = batch(rollout)
                    for number, start in enumerate(range(0, len(found), GROUP)):
                        await groups.sender.put(
                            SampleGroup(
                                iteration=rollout,
                                group=number,
                                samples=found[start : start + GROUP],
                            ),
                            key=0,
                        )
                    reports += await actors.call(FSDPActor.run_training, groups.receiver)
        return reports

    return ra.run(train())


def equal(
    theirs: Sequence[LanguageTrainReport],
    ours: LanguageTrainReport,
    metrics: Sequence[str] = METRICS,
) -> None:
    for report in theirs:
        for name in metrics:
            wanted = pytest.approx(ours.metrics[name], abs=TOLERANCE, rel=TOLERANCE)
            assert report.metrics[name] == wanted, name


def asleep(ray: Any, group: RayTrainGroup) -> list[str]:
    """What sleeps on rank 1."""
    return list(
        ray.get(group.actors[1].__ray_call__.remote(lambda one: sorted(one._worker.asleep)))
    )


def test_it_trains_sleeps_saves_and_goes_on_as_our_actor_trains(ray: Any, tmp_path: Path) -> None:
    given = args(save=str(tmp_path), load=str(tmp_path), offload_train=True)
    ours = our_actor(given, 3)
    pg = create_placement_group(2)
    group = RayTrainGroup(given, 1, 2, pg)
    try:
        assert ray.get(group.async_init(given, role="actor")) == [0, 0]  # asleep from here on
        assert asleep(ray, group) == ["weights"]  # there are no moments yet
        equal(ray.get(group.async_train(0, ray.put(columns(batch(0))))), ours[0])
        assert asleep(ray, group) == []
        group.offload()
        group.onload(["weights"])
        assert asleep(ray, group) == ["optimizer"]
        group.offload(["weights"])
        group.clear_memory()
        group.update_weights()  # there are no engines, by debug_train_only
        shares = [columns([s for s in batch(1) if s.group % 2 == rank]) for rank in range(2)]
        equal(ray.get(group.async_train(1, [ray.put(share) for share in shares])), ours[1])
        group.offload()
        group.save_model(1)
        assert asleep(ray, group) == ["optimizer", "weights"]
    finally:
        group.shutdown()
    group = RayTrainGroup(given, 1, 2, pg)
    try:

        async def go_on() -> tuple[list[int], list[LanguageTrainReport]]:
            starts = await group.async_init()
            return starts, await group.async_train(2, columns(batch(2)))

        starts, reports = asyncio.run(go_on())
        assert starts == [2, 2]
        equal(reports, ours[2])
        with pytest.raises(RolloutDataError, match="rollout data has no tokens"):
            ray.get(group.async_train(3, {"rewards": [1.0]}))
        # Wrong on one rank alone: the other does not wait for it.
        right, wrong = group.async_train(3, [ray.put(shares[0]), ray.put(5)])
        with pytest.raises(RolloutDataError, match="rollout data is a int"):
            ray.get(wrong)
        with pytest.raises(RuntimeError, match="another rank failed, see its error"):
            ray.get(right)
        with pytest.raises(ValueError, match=r"was given 4 samples .* share of a rollout is 8"):
            ray.get(group.async_train(3, columns(batch(3)[:8])))
        with pytest.raises(RuntimeError, match="once is enough"):
            ray.get(group.async_init())
        with pytest.raises(ValueError, match="tags has 'kv_cache'; it may hold optimizer, weights"):
            group.offload(["kv_cache"])
        # A folder that rank 0 cannot make: the error says so, whichever rank is heard first.
        (tmp_path / ".iter_0000009.partial").write_text("")
        with pytest.raises(NotADirectoryError, match=r"iter_0000009.partial") as refused:
            group.save_model(9)
        assert any("actor[1]: CheckpointError" in note for note in refused.value.__notes__)
    finally:
        group.shutdown()
    with pytest.raises(RuntimeError, match=r"save_model\(\) of a group that was shut down"):
        group.save_model(3)


def test_ranks_that_would_begin_at_different_rollouts_are_refused(ray: Any, tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000004"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4\n")
    group = RayTrainGroup(args(), 1, 2, create_placement_group(2))
    try:
        starting = [
            group.actors[0].init.remote(args(), "actor"),
            group.actors[1].init.remote(args(load=str(tmp_path)), "actor"),
        ]
        for rank, one in enumerate(starting):
            with pytest.raises(ValueError, match=r"different rollouts \(rank 0: 0, rank 1: 5\)"):
                ray.get(one)
            with pytest.raises(RuntimeError, match=r"train\(\) before init\(\)"):
                ray.get(group.actors[rank].train.remote(0, columns(batch(0))))
        smaller = RayTrainGroup(args(), 1, 1, create_placement_group(1), role="critic")
        with pytest.raises(ValueError, match="2 ranks of the actor cannot be paired with 1 of"):
            group.connect(smaller)
        smaller.shutdown()
    finally:
        group.shutdown()


def test_without_training_the_next_rollout_is_0(ray: Any, tmp_path: Path) -> None:
    given = args(debug_rollout_only=True, train_env_vars={"SEEN": "there"}, use_routing_replay=True)
    group = RayTrainGroup(given, 1, 1, create_placement_group(1), num_gpus_per_actor=0.4)
    try:
        assert ray.get(group.async_init()) == [0]
        assert ray.get(group.async_train(0, [])) == [None]
        group.update_weights()
        group.save_model(0)
        address, port = ray.get(group.actors[0].get_master_addr_and_port.remote())
        assert address == ray.util.get_node_ip_address()
        assert port > 0
    finally:
        group.shutdown()


def test_what_cannot_be_had_is_refused(ray: Any) -> None:
    with pytest.raises(BuildError, match=r"64 bundles of 1 CPU was not free within 1 s: of 1 host"):
        create_placement_group(64, wait=1.0)
    pg = create_placement_group(1)
    with pytest.raises(ValueError, match="2 ranks need 2 bundles, but pg names 1"):
        RayTrainGroup(args(), 2, 1, pg)
    with pytest.raises(ValueError, match="total_batch_size=16 does not divide over 3 ranks"):
        RayTrainGroup(args(), 1, 3, (pg.group, [0, 0, 0], [""] * 3))
    with pytest.raises(ValueError, match="num_gpus_per_actor is 2; a rank has one device"):
        RayTrainGroup(args(), 1, 1, pg, num_gpus_per_actor=2)
    with pytest.raises(ValueError, match="role is 'judge'; it must be one of actor, critic"):
        RayTrainGroup(args(), 1, 1, pg, role="judge")
