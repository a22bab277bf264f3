"""One rank without Ray: tagged weights, log-probs of which weights, the hook."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rlinf_async.backends.language_training.weights import KeptWeightsError
from rlinf_async.channels import Latest
from rlinf_async.messages.language import SampleGroup, TrainingSample
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.runtime.ray.training import RolloutData, TrainArgs
from rlinf_async.runtime.ray.training.worker import GroupActor
from rlinf_async.weights.pack import unpack
from rlinf_async.workers.base import WorkerContext, WorkerInfo, make
from tests.jobs.language.checkpoints import save_checkpoint
from tests.runtime.ray.training.kit import args, batch, columns


@asynccontextmanager
async def rank(given: TrainArgs, *, with_ref: bool = False) -> AsyncIterator[GroupActor]:
    """A rank that is ready."""
    with ThreadPoolExecutor(1) as executor:
        context = WorkerContext(WorkerInfo(group="actor", rank=0, world_size=1), executor)
        worker = make(GroupActor, context, (given, "cpu"), {"with_ref": with_ref})
        await worker.setup()
        yield worker


def rollout(number: int, given: TrainArgs, *, log_probs: bool = True) -> list[SampleGroup]:
    data = columns(batch(number), log_probs=log_probs)
    return RolloutData.of(data).groups(given, rollout_id=number, version=number)


async def log_probs(worker: GroupActor, groups: list[SampleGroup]) -> list[Any]:
    samples = [sample for group in groups for sample in group.samples]
    trainer: Any = worker._trainer
    return await worker.compute(trainer.log_probs, samples)


async def published(worker: GroupActor) -> dict[str, Any]:
    weights = Latest(WeightUpdate, name="weights")
    await worker.sync_model_to_rollout(weights.sender)
    return {name: one.clone() for name, one in unpack(await weights.receiver.get()).items()}


def same(found: list[Any], wanted: list[Any]) -> bool:
    return all(np.allclose(one, two, atol=1e-5) for one, two in zip(found, wanted, strict=True))


async def test_the_model_is_switched_between_tagged_weights_and_trains_its_own() -> None:
    given = args(keep_old_actor=True)
    async with rank(given, with_ref=True) as worker:
        assert worker.tags == ["actor", "old_actor", "ref", "rollout_actor"]
        groups = rollout(0, given)
        first = await log_probs(worker, groups)
        await worker.train_rollout(groups, rollout_id=0)
        trained = await log_probs(worker, groups)
        weights = await published(worker)
        assert not same(trained, first)
        for tag in ("ref", "old_actor", "rollout_actor"):
            await worker.switch(tag)
            assert same(await log_probs(worker, groups), first)
        after = await published(worker)  # switches back
        assert all(after[name].equal(one) for name, one in weights.items())
        assert same(await log_probs(worker, groups), trained)
        await worker.shift_weights()  # the engines have what was trained, and had the first weights
        await worker.switch("rollout_actor")
        assert same(await log_probs(worker, groups), trained)
        await worker.switch("old_actor")
        assert same(await log_probs(worker, groups), first)
        with pytest.raises(KeptWeightsError, match="no weights are kept as 'mine'; there are: ref"):
            await worker.switch("mine")


async def test_the_ratio_is_to_the_weights_that_the_engines_had() -> None:
    given = args(keep_old_actor=True, use_rollout_logprobs=False, update_weights_interval=2)
    async with rank(given) as worker:
        first = rollout(0, given, log_probs=False)
        expected = await log_probs(worker, first)
        report = await worker.train_rollout(first, rollout_id=0)
        assert report.metrics["clip_fraction"] < 0.5  # not to the random log-probs of the batch
        second = rollout(1, given, log_probs=False)
        await worker.switch("old_actor")
        expected = await log_probs(worker, second)
        await worker.train_rollout(second, rollout_id=1)
        found = [sample for group in second for sample in group.samples]
        assert same([one.prev_log_prob for one in found], expected)
        assert same([one.log_prob for one in found], expected)
        await worker.shift_weights()
        await worker.switch("old_actor")
        assert not same(await log_probs(worker, second), expected)


async def test_tis_without_log_probs_of_the_rollout_is_refused() -> None:
    given = args(use_tis=True, use_rollout_logprobs=False)
    async with rank(given) as worker:
        with pytest.raises(ValueError, match="use_tis needs rollout_log_probs of every sample"):
            await worker.train_rollout(rollout(0, given, log_probs=False), rollout_id=0)


async def test_the_reference_is_another_folder_and_becomes_what_was_trained(
    tmp_path: Path,
) -> None:
    mine = save_checkpoint(tmp_path / "mine", "qwen3")
    other = save_checkpoint(tmp_path / "other", "qwen3", initializer_range=0.2)
    given = args(
        hf_checkpoint=str(mine),
        model_config={},
        ref_load=str(other),
        ref_update_interval=2,
        save=str(tmp_path / "save"),
    )
    resumed = msgspec.structs.replace(given, load=given.save)
    async with (
        rank(given, with_ref=True) as worker,
        rank(args(hf_checkpoint=str(other), model_config={})) as reference,
    ):
        groups = rollout(0, given)
        expected = await log_probs(reference, groups)
        assert not same(await log_probs(worker, groups), expected)
        await worker.train_rollout(groups, rollout_id=0)
        assert same([s.ref_log_prob for group in groups for s in group.samples], expected)
        await worker.train_rollout(rollout(1, given), rollout_id=1)
        trained = await log_probs(worker, groups)
        await worker.switch("ref")
        assert same(await log_probs(worker, groups), trained)
        await worker.save(1)
    async with rank(resumed, with_ref=True) as worker:
        assert worker.start_rollout_id == 2
        await worker.switch("ref")
        assert same(await log_probs(worker, groups), trained)


def only_the_first(given: TrainArgs, samples: list[TrainingSample]) -> None:
    for sample in samples[1:]:
        sample.loss_mask[:] = False


def fewer(given: TrainArgs, samples: list[TrainingSample]) -> list[TrainingSample]:
    return samples[:-1]


async def test_the_hook_sees_the_samples_of_this_rank_before_they_are_trained() -> None:
    given = args(
        rollout_data_postprocess_path=f"{__name__}:only_the_first", num_steps_per_rollout=1
    )
    async with rank(given) as worker:
        groups = rollout(0, given)
        report = await worker.train_rollout(groups, rollout_id=0)
        assert report.metrics["tokens"] == groups[0].samples[0].loss_mask.sum()
    async with rank(args(rollout_data_postprocess_path=f"{__name__}.fewer")) as worker:
        with pytest.raises(ValueError, match="returned 15 samples of 16: it may change them, but"):
            await worker.train_rollout(rollout(0, given), rollout_id=0)
