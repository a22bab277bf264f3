"""Samples in, samples with the actor's log-probs out: real trainers, several ranks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Sample
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.inference import (
    EarlierVersions,
    InferenceConfig,
    InferenceReport,
    InferenceWorker,
    TeacherQuestions,
)
from tests.backends.language.kit import VOCABULARY, micro_batches, samples
from tests.workers.actor.language.kit import CONFIG, KEEPING, Channels, sample_of

pytestmark = pytest.mark.parametrize("loop_kind", ["uvloop"])


async def versions(count: int) -> list[tuple[PolicyTrainer, WeightUpdate]]:
    """See `_versions`; importing transformers takes too long for the loop."""
    return await asyncio.to_thread(_versions, count)


def _versions(count: int) -> list[tuple[PolicyTrainer, WeightUpdate]]:
    """Trainers of version 0, 1, ... and what each publishes."""
    found = []
    for version in range(count):
        trainer = PolicyTrainer(CONFIG, 1, 0)
        for _ in range(version):
            trainer.training_step(micro_batches(trainer.compute_advantages(samples(2)), 8))
            trainer.end_iteration()
        found.append((trainer, trainer.publish()))
    return found


def expected(trainer: PolicyTrainer, sample: Sample) -> Floats:
    batch = samples(sample.request.group + 1)
    [one] = [
        one
        for one in batch
        if (one.group, one.index) == (sample.request.group, sample.request.index)
    ]
    return trainer.log_probs([one])[0]


async def answered(
    sent: list[Sample],
    updates: list[WeightUpdate],
    config: InferenceConfig,
    ranks: int = 1,
) -> tuple[list[Sample], list[InferenceReport]]:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        workers = await cluster.launch(InferenceWorker, KEEPING, config, count=ranks)
        running = workers.call(
            InferenceWorker.run,
            channels.samples.receiver,
            channels.done.sender,
            channels.weights.receiver,
        )
        for sample in sent:
            await channels.samples.sender.put(sample)
        channels.samples.sender.close()
        for update in updates:
            await channels.weights.sender.publish(update)
        reports = await running
        return [sample async for sample in channels.done.receiver], reports


@pytest.mark.parametrize("ranks", [1, 2])
async def test_every_sample_comes_out_once_with_both_log_probs(ranks: int, loop_kind: str) -> None:
    [(trainer, update)] = await versions(1)
    sent = [sample_of(group, index) for group in range(3) for index in range(4)]
    config = InferenceConfig(max_samples=5, reference=True)
    done, reports = await answered(sent, [update], config, ranks)
    assert sorted(one.request.name for one in done) == sorted(one.request.name for one in sent)
    right = await asyncio.to_thread(lambda: [expected(trainer, one) for one in done])
    for one, log_prob in zip(done, right, strict=True):
        assert one.prev_log_prob is not None
        assert one.ref_log_prob is not None
        np.testing.assert_allclose(one.prev_log_prob, log_prob, atol=1e-5)
        np.testing.assert_allclose(one.ref_log_prob, log_prob, atol=1e-5)
    assert sum(report.samples for report in reports) == len(sent)
    tokens = [len(one.request.prompt.token_ids) + len(one.generated.token_ids) for one in sent]
    assert sum(report.tokens for report in reports) == sum(tokens)


async def test_a_sample_waits_for_the_weights_of_its_newest_token(loop_kind: str) -> None:
    (first, old), (second, new) = await versions(2)
    sent = [sample_of(0, 0, version=1)]
    done, [report] = await answered(sent, [old, new], InferenceConfig(reference=True))
    assert done[0].prev_log_prob is not None
    assert done[0].ref_log_prob is not None
    np.testing.assert_allclose(done[0].prev_log_prob, expected(second, done[0]), atol=1e-5)
    np.testing.assert_allclose(done[0].ref_log_prob, expected(first, done[0]), atol=1e-5)
    assert report.version == 1
    assert np.abs(done[0].prev_log_prob - done[0].ref_log_prob).max() > 1e-4


async def test_older_samples_are_answered_for_under_the_newest_weights_too(loop_kind: str) -> None:
    (first, old), (second, new) = await versions(2)
    sent = [sample_of(0, 0, version=0), sample_of(0, 1, version=1)]
    [stale, _], [report] = await answered(sent, [old, new], InferenceConfig())
    assert report.batches == 1
    assert stale.generated.version.max() == 0
    assert stale.prev_log_prob is not None
    np.testing.assert_allclose(stale.prev_log_prob, expected(second, stale), atol=1e-5)
    assert np.abs(stale.prev_log_prob - expected(first, stale)).max() > 1e-4


async def test_a_teacher_alone_waits_for_no_weights_and_is_not_shown_evaluations(
    loop_kind: str,
) -> None:
    """There is no model of the actor: its configuration is none."""
    config = InferenceConfig(
        previous=False, teacher=TeacherQuestions(top_k=3, vocabulary=VOCABULARY)
    )
    other = msgspec.structs.replace(CONFIG, seed=7)
    sent = [sample_of(group, 0, version=9) for group in range(3)]
    sent[1].request = msgspec.structs.replace(sent[1].request, evaluation=True)
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        workers = await cluster.launch(InferenceWorker, None, config, other)
        running = workers.call(
            InferenceWorker.run,
            channels.samples.receiver,
            channels.done.sender,
            channels.weights.receiver,
        )
        for sample in sent:
            await channels.samples.sender.put(sample)
        channels.samples.sender.close()
        [report] = await running
        done = [sample async for sample in channels.done.receiver]
    assert (report.samples, report.version, report.weight_updates) == (3, -1, 0)
    trainer = await asyncio.to_thread(PolicyTrainer, other, 1, 0)
    for one, evaluated in zip(done, (False, True, False), strict=True):
        assert one.prev_log_prob is None
        assert (one.teacher is None) == evaluated
        if one.teacher is not None:
            right = await asyncio.to_thread(expected, trainer, one)
            np.testing.assert_allclose(one.teacher.drawn, right, atol=1e-5)
            assert one.teacher.likely.shape == (len(right), 3)


async def test_weights_that_will_never_come_are_an_error(loop_kind: str) -> None:
    [(_, update)] = await versions(1)
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        workers = await cluster.launch(InferenceWorker, CONFIG)
        running = workers.call(
            InferenceWorker.run,
            channels.samples.receiver,
            channels.done.sender,
            channels.weights.receiver,
        )
        await channels.samples.sender.put(sample_of(0, 0, version=3))
        await channels.weights.sender.publish(update)
        channels.weights.sender.close()
        with pytest.raises(ra.WorkerError, match=r"version 3 are asked for, the newest are 0"):
            await running


async def test_only_what_is_asked_for_is_computed(loop_kind: str) -> None:
    [(_, update)] = await versions(1)
    sent = [sample_of(0, 0)]
    done, _ = await answered(sent, [update], InferenceConfig(previous=False, reference=True))
    assert done[0].prev_log_prob is None
    assert done[0].ref_log_prob is not None
    with pytest.raises(ValueError, match=r"there is nothing to compute"):
        InferenceConfig(previous=False)


async def test_a_cancelled_worker_gives_back_what_it_had_not_sent_on(loop_kind: str) -> None:
    [(_, update)] = await versions(1)
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        narrow = cluster.channel(Sample, name="narrow", capacity=1)
        workers = await cluster.launch(InferenceWorker, CONFIG, InferenceConfig(max_samples=1))
        sent = [sample_of(0, index) for index in range(4)]
        for sample in sent:
            await channels.samples.sender.put(sample)
        await channels.weights.sender.publish(update)
        running = workers.call(
            InferenceWorker.run,
            channels.samples.receiver,
            narrow.sender,
            channels.weights.receiver,
        )
        first = await narrow.receiver.get()  # the second is in the channel, or on its way
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        names = [first.request.name]
        names += [one.request.name async for one in narrow.receiver]
        left = (await channels.samples.receiver.statistics()).depth
        assert len(names) + left == len(sent)
        rest = [(await channels.samples.receiver.get()).request.name for _ in range(left)]
        assert sorted(names + rest) == sorted(one.request.name for one in sent)


@pytest.mark.parametrize("kept", [4, None])
async def test_a_sample_whose_teacher_was_removed_passes_and_one_without_any_is_an_error(
    loop_kind: str, kept: int | None, tmp_path: Path
) -> None:
    """Where later versions are there, it was trained: it is a second delivery."""
    earlier = EarlierVersions(folder=str(tmp_path), every=2)
    if kept is not None:
        earlier.path(kept).mkdir()
    asked = TeacherQuestions(top_k=3, vocabulary=VOCABULARY)
    config = InferenceConfig(previous=False, teacher=asked, earlier=earlier)
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        workers = await cluster.launch(InferenceWorker, None, config, None)
        running = workers.call(
            InferenceWorker.run,
            channels.samples.receiver,
            channels.done.sender,
            channels.weights.receiver,
        )
        await channels.samples.sender.put(sample_of(0, 0, version=3))
        channels.samples.sender.close()
        if kept is None:
            with pytest.raises(ra.WorkerError, match="version 2 of the policy, which is its"):
                await running
            return
        await running
        assert [one.teacher async for one in channels.done.receiver] == [None]
