"""What a language actor trains on, and what it says of it: the real trainer on one rank."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.algorithms.config import LanguageAdvantageConfig
from rlinf_async.backends import parts
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.checkpoint import writing as writer
from rlinf_async.backends.checkpoint.folders import rank_done
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.channels.batching import BatchSizeError
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import (
    LanguageTrainReport,
    Sample,
    SampleGroup,
    TrainingSample,
)
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights.pack import unpack
from rlinf_async.workers.actor import FSDPActor, LanguageBatches
from tests.backends.language.kit import assert_close, episodes, trainer_config
from tests.workers.actor.language.kit import BATCHES, CONFIG, KEEPING, Channels, groups, sample_of

Trained = tuple[list[LanguageTrainReport], WeightUpdate]

pytestmark = pytest.mark.parametrize("loop_kind", ["uvloop"])


async def trained(
    iterations: list[list[SampleGroup]],
    *,
    pipeline: bool = False,
    trainer: Any = CONFIG,
    batches: LanguageBatches = BATCHES,
    **actor: Any,
) -> Trained:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(FSDPActor, trainer, batches, **actor)
        [version] = await actors.call(FSDPActor.version)
        training = asyncio.create_task(
            channels.train(actors, version + len(iterations), pipeline=pipeline)
        )
        for made in iterations:
            await channels.send(made)
        return await training, await channels.weights.receiver.get()


@pytest.mark.parametrize("name", ["grpo", "reinforce++"])
@pytest.mark.parametrize("window", [None, 4])
async def test_pipelined_and_collected_training_make_the_same_weights(
    name: str, window: int | None, loop_kind: str
) -> None:
    trainer = msgspec.structs.replace(CONFIG, advantage=LanguageAdvantageConfig(name=name))
    windows = msgspec.structs.replace(BATCHES, balance_window=window)
    work = [groups(0), groups(1, version=1)]
    collected, weights = await trained(work, trainer=trainer)
    pipelined, same = await trained(work, pipeline=True, trainer=trainer, batches=windows)
    assert_close(unpack(same), unpack(weights), 1e-6)
    for ours, theirs in zip(pipelined, collected, strict=True):
        for metric in ("loss", "grad_norm", "entropy", "tokens"):
            expected = theirs.metrics[metric]
            assert ours.metrics[metric] == pytest.approx(expected, rel=1e-4, abs=1e-6)


class Announcing(PolicyTrainer):
    """Says when it is given its first micro-batch."""

    began: ClassVar[threading.Event] = threading.Event()

    def _part(self, *args: Any, **kwargs: Any) -> Any:
        self.began.set()
        return super()._part(*args, **kwargs)


@pytest.fixture
def announcing(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of that trainer, which has not begun."""
    monkeypatch.setitem(parts.language_trainers.paths, "announcing", f"{__name__}:Announcing")
    monkeypatch.setattr(Announcing, "began", threading.Event())
    return "announcing"


STREAMED = LanguageBatches(samples=16, group_size=4, micro_batch_size=4)


async def test_pipelined_training_begins_before_the_last_group_is_there(
    announcing: str, loop_kind: str
) -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(FSDPActor, CONFIG, STREAMED, backend=announcing)
        training = actors.call(FSDPActor.run_training_pipeline, channels.groups.receiver)
        made = groups(0)
        await channels.send(made[:1])
        assert await asyncio.to_thread(Announcing.began.wait, 60)
        await channels.send(made[1:])
        [report] = await training
        assert report.samples == 16
        spans = sorted(await cluster.spans(), key=lambda one: one.start)
        names = [one.name for one in spans if one.name != "micro-batch"]
        assert names == [*["train", "wait samples"] * 4, "train"]
        assert len(spans) - len(names) == 4
        waited = sum(one.duration for one in spans if one.waiting) / 1e9
        assert 0 < waited < report.train_seconds
        assert report.wait_seconds == pytest.approx(waited, abs=0.05)


async def test_a_pipelined_training_that_waits_for_samples_can_be_cancelled(
    announcing: str, loop_kind: str
) -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(FSDPActor, CONFIG, STREAMED, backend=announcing)
        training = actors.call(FSDPActor.run_training_pipeline, channels.groups.receiver)
        await channels.send(groups(0)[:1])
        assert await asyncio.to_thread(Announcing.began.wait, 60)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        # The compute thread answers again: nothing waits in it.
        assert await actors.call(FSDPActor.log_probs, []) == [[]]


async def test_a_report_tells_of_the_iteration(loop_kind: str) -> None:
    made = groups(0)
    for one in made[2].samples:
        one.reward = 0.5
    every = [one for group in made for one in group.samples]
    [report], _ = await trained([made])
    assert (report.iteration, report.version, report.rank, report.steps) == (0, 1, 0, 2)
    assert (report.samples, report.groups, report.groups_without_signal) == (16, 4, 1)
    assert report.unscored == sum(not one.scored for one in every) == 2
    assert report.response_tokens == sum(len(one.response_ids) for one in every)
    assert report.prompt_tokens == sum(len(one.prompt_ids) for one in every)
    rewards = [one.reward for one in every if one.scored]
    assert report.reward_mean == pytest.approx(np.mean(rewards))
    assert (report.lag_mean, report.lag_max) == (0.0, 0)
    assert report.metrics["skipped"] == 0.0
    assert report.train_seconds > 0.0


async def test_lags_are_counted_over_tokens_and_bounded(loop_kind: str) -> None:
    late = groups(1, version=1)
    tokens = sum(len(one.version) for group in late for one in group.samples)
    late[0].samples[0].version = late[0].samples[0].version - 1
    _, report = (await trained([groups(0), late], max_staleness=1))[0]
    assert report.lag_max == 1
    assert report.lag_mean == pytest.approx(len(late[0].samples[0].version) / tokens)
    with pytest.raises(ra.WorkerError, match=r"1 to 1 versions old, but max_staleness is 0"):
        await trained([groups(0), late], max_staleness=0)
    with pytest.raises(ra.WorkerError, match=r"-1 to -1 versions old, but max_staleness is any"):
        await trained([groups(0, version=1)])


async def test_what_was_given_has_no_version_and_is_no_response(loop_kind: str) -> None:
    made = episodes(4)
    late = [
        SampleGroup(iteration=0, group=at, samples=made[4 * at : 4 * at + 4]) for at in range(4)
    ]
    [report], _ = await trained([late], max_staleness=0)  # -1 would be newer than any
    drawn = sum(int(one.drawn_mask.sum()) for one in made)
    assert (report.lag_mean, report.lag_max) == (0.0, 0)
    assert report.response_tokens == drawn
    assert report.prompt_tokens == sum(one.tokens for one in made) - drawn
    made = episodes(4)
    assert made[0].drawn is not None
    made[0].version[np.flatnonzero(made[0].drawn)[-1]] = -1  # the oldest token over all turns
    late[0] = SampleGroup(iteration=0, group=0, samples=made[:4])
    with pytest.raises(ra.WorkerError, match=r"0 to 1 versions old, but max_staleness is 0"):
        await trained([late], max_staleness=0)


async def test_rewards_of_turns_are_a_signal_where_outcomes_are_equal(loop_kind: str) -> None:
    made = episodes(4)
    for one in made:
        one.reward = 1.0
        if one.group == 3:
            one.turns = ()
    every = [
        SampleGroup(iteration=0, group=at, samples=made[4 * at : 4 * at + 4]) for at in range(4)
    ]
    [report], _ = await trained([every])
    assert report.groups_without_signal == 1


async def test_a_run_that_is_resumed_from_a_checkpoint_makes_the_same_weights(
    tmp_path: Path, loop_kind: str
) -> None:
    work = [groups(at, version=at) for at in range(3)]
    reports, weights = await trained(work)
    folder = tmp_path / "version-000002"
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(FSDPActor, CONFIG, BATCHES)
        for made in work[:2]:
            await channels.send(made)
        await channels.train(actors, 2)
        await actors.call(FSDPActor.begin_checkpoint, str(folder))
        await actors.call(FSDPActor.checkpoint_written)
    again, same = await trained(work[2:], resume=str(folder))
    assert [report.iteration for report in again] == [2]
    assert again[0].metrics["loss"] == reports[2].metrics["loss"]
    assert same.checksum == weights.checksum


async def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop_kind: str
) -> None:
    report_is_out = threading.Event()

    def held_up(*given: Any) -> None:
        assert report_is_out.wait(60)
        rank_done(*given)

    monkeypatch.setattr(writer, "rank_done", held_up)
    first, second = tmp_path / "version-000001", tmp_path / "version-000002"
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(FSDPActor, CONFIG, BATCHES)
        await channels.send(groups(0))
        await channels.send(groups(1, version=1))
        kept = channels.groups.receiver.clone()
        await channels.train(actors, 1)
        await actors.call(FSDPActor.begin_checkpoint, str(first))
        [report] = await channels.train(actors, 2)
        assert report.version == 2
        assert not first.exists()
        report_is_out.set()
        await actors.call(FSDPActor.begin_checkpoint, str(second))  # waits for the first
        assert first.exists()
        await actors.call(FSDPActor.checkpoint_written)
        assert second.exists()
        kept.close()


async def test_offloaded_between_iterations_it_trains_to_the_same_weights(loop_kind: str) -> None:
    work = [groups(at, version=at) for at in range(2)]
    _, expected = await trained(work)
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(FSDPActor, CONFIG, BATCHES)
        checksums = []
        for made in work:
            training = actors.call(FSDPActor.run_training, channels.groups.receiver)
            await channels.send(made)
            await training
            [state] = await actors.call(FSDPActor.get_model_state_and_offload)
            checksums.append(state.checksum)
        assert checksums[-1] == expected.checksum
        assert await actors.call(FSDPActor.version) == [2]


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("field", ["log_prob", "prev_log_prob", "ref_log_prob"])
async def test_a_log_prob_that_is_not_finite_is_named_where_its_sample_arrives(
    pipeline: bool, field: str, loop_kind: str
) -> None:
    made = groups(0)
    of = made[0].samples[0]
    number = -math.inf if pipeline else math.nan
    setattr(of, field, np.array([number, *of.log_prob[1:]], np.float32))
    whose = {"log_prob": "the engine", "prev_log_prob": "the forward", "ref_log_prob": "the ref"}
    with pytest.raises(ra.WorkerError, match="ModelOutputError") as raised:
        await trained([made], pipeline=pipeline)
    said = str(raised.value).partition("Traceback")[0]
    token = f"sample {of.group}/{of.index}: the log-prob of token 0 (id {of.response_ids[0]})"
    assert token in said
    assert f"is {'-inf' if pipeline else 'nan'} by {whose[field]}" in said
    assert "learning rate" not in said


@pytest.mark.parametrize("pipeline", [False, True])
async def test_a_loss_that_is_nan_ends_the_run_and_says_why(pipeline: bool, loop_kind: str) -> None:
    made = groups(0)
    made[0].samples[0].advantage = np.full_like(made[0].samples[0].log_prob, math.nan)
    with pytest.raises(ra.WorkerError, match=r"TrainingDiverged.*the loss is nan"):
        await trained([made], pipeline=pipeline)


async def test_an_engine_of_another_distribution_ends_the_run_at_the_first_step(
    loop_kind: str,
) -> None:
    strict = msgspec.structs.replace(CONFIG, engine_tolerance=1e-3)
    with pytest.raises(ra.WorkerError, match=r"EngineDisagrees: version 0: the engine's log-probs"):
        await trained([groups(0)], trainer=strict)


async def test_an_iteration_of_skipped_steps_only_ends_the_run(loop_kind: str) -> None:
    made = groups(0)
    for group in made:
        for one in group.samples:
            # Ratios, and with them gradients, whose squares are infinite in float32.
            one.log_prob = one.log_prob - np.float32(70.0)
    exploding = trainer_config(
        fsdp={"optimizer": OptimizerConfig(max_grad_norm=1.0)},
        loss=msgspec.structs.replace(CONFIG.loss, name="ppo", clip_high=1e38, log_ratio_limit=80.0),
    )
    with pytest.raises(ra.WorkerError, match=r"TrainingDiverged"):
        await trained([made], trainer=exploding)


async def test_a_missing_reference_is_said_before_anything_is_trained(loop_kind: str) -> None:
    made = groups(0)
    made[0].samples[1].ref_log_prob = None
    penalised = msgspec.structs.replace(
        CONFIG, advantage=LanguageAdvantageConfig(kl_coefficient=0.1)
    )
    with pytest.raises(ra.WorkerError, match=r"sample 0/1 has no ref_log_prob"):
        await trained([made], trainer=penalised)


async def test_groups_that_cross_the_border_of_an_iteration_are_refused(loop_kind: str) -> None:
    batches = msgspec.structs.replace(BATCHES, samples=6, group_size=2, optimizer_steps=1)
    with pytest.raises(ra.WorkerError, match=r"2 samples are left after an iteration of 6"):
        await trained([groups(0)], batches=batches)


async def test_sizes_that_do_not_divide_are_refused_when_the_actor_is_built(
    loop_kind: str,
) -> None:
    batches = LanguageBatches(samples=16, group_size=4, optimizer_steps=3)
    with pytest.raises(BatchSizeError, match=r"num_global_batches=3 does not divide"):
        batches.of_rank(1)
    with pytest.raises(BatchSizeError, match=r"does not divide over 3 ranks"):
        BATCHES.of_rank(3)


async def test_inference_sends_each_sample_on_with_its_log_probs(loop_kind: str) -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(FSDPActor, KEEPING, BATCHES)
        running = actors.call(
            FSDPActor.run_inference, channels.samples.receiver, channels.done.sender, True
        )
        sent = [sample_of(group, index) for group in range(4) for index in range(4)]
        for sample in sent:
            await channels.samples.sender.put(sample)
        assert await running == [16]
        done = [sample async for sample in channels.done.receiver]
    await asyncio.to_thread(check_log_probs, sent, done)


class LastRank(FSDPActor):
    """One of two ranks, of which one trains; without collectives."""

    @property
    def active_world_size(self) -> int:
        return 1

    async def join_collective(self) -> None:
        pass

    async def scheduler_scale_sync(self) -> None:
        pass

    def make_trainer(self) -> PolicyTrainer:
        return PolicyTrainer(CONFIG, 1, 0)


async def test_after_a_rescale_to_one_rank_inference_waits_for_no_whole_micro_batch(
    loop_kind: str,
) -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(LastRank, CONFIG, BATCHES, count=2)
        running = actors.call(
            LastRank.run_inference, channels.samples.receiver, channels.done.sender
        )
        sender, done = channels.samples.sender, channels.done.receiver
        for index in range(16):  # each comes back before the next is sent
            await sender.put(sample_of(index // 4, index % 4))
            assert (await done.get()).request.index == index % 4
        assert await running == [16, 0]


def check_log_probs(sent: list[Sample], done: list[Sample]) -> None:
    """Every sample came once, with the log-probs of the first weights under its temperature."""
    trainer = PolicyTrainer(CONFIG, 1, 0)
    by_name = {sample.request.name: sample for sample in done}
    assert len(done) == len(by_name)
    assert by_name.keys() == {sample.request.name for sample in sent}
    every = [one for group in groups(0) for one in group.samples]
    for one, expected in zip(every, trainer.log_probs(every), strict=True):
        found = by_name[f"{one.group}/{one.index}"]
        assert found.ref_log_prob is not None
        assert found.prev_log_prob is not None
        np.testing.assert_allclose(found.ref_log_prob, expected, atol=1e-5)
        np.testing.assert_allclose(found.prev_log_prob, expected, atol=1e-5)


def engine_log_probs(
    seed: int, probes: list[TrainingSample], update: WeightUpdate | None = None
) -> list[Floats]:
    """Of a model of this seed that took the update, if there is one."""
    engine = PolicyTrainer(trainer_config(seed=seed), 1, 0)
    if update is not None:
        engine.load(update)
    return engine.log_probs(probes)


async def test_an_engine_with_the_same_weights_agrees_and_one_with_others_does_not(
    loop_kind: str,
) -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(FSDPActor, CONFIG, BATCHES)
        await actors.call(FSDPActor.sync_model_to_rollout, channels.weights.sender)
        update = await channels.weights.receiver.get()
        probes = [one for group in groups(0)[:2] for one in group.samples]
        for one in probes:
            one.temperature = 1.0
        tokens = [(one.prompt_ids, one.response_ids) for one in probes]
        check = FSDPActor.check_weight_update_equal
        same = await asyncio.to_thread(engine_log_probs, 0, probes, update)
        stale = await asyncio.to_thread(engine_log_probs, 1, probes)
        [worst] = await actors.call(check, tokens, same, 1e-4)
        assert worst < 1e-5
        with pytest.raises(ra.WorkerError, match=r"WeightsDisagree.*token \d+ of sequence 0 is -"):
            await actors.call(check, tokens, stale, 1e-4)


async def test_a_comparison_in_the_mean_lets_single_tokens_differ(loop_kind: str) -> None:
    async with ra.Cluster.local() as cluster:
        actors = await cluster.launch(FSDPActor, CONFIG, BATCHES)
        pairs = [(one.prompt_ids, one.response_ids) for one in groups(0)[0].samples]
        [own] = await actors.call(FSDPActor.log_probs, pairs)
        own[1][0] += 0.5
        check, tokens = FSDPActor.check_weight_update_equal, sum(len(one) for one in own)
        [worst] = await actors.call(check, pairs, own, 0.6 / tokens, True)
        assert worst == pytest.approx(0.5, abs=1e-4)
        for arguments in [(0.4, False), (0.4 / tokens, True)]:
            with pytest.raises(ra.WorkerError, match=r"token 0 of sequence 1 is .*mean of all"):
                await actors.call(check, pairs, own, *arguments)
        own[0][0] = np.nan
        with pytest.raises(ra.WorkerError, match="token 0 of sequence 0 is nan"):
            await actors.call(check, pairs, own, 10.0, True)


async def test_a_log_prob_that_is_nan_never_passes_the_comparison(loop_kind: str) -> None:
    async with ra.Cluster.local() as cluster:
        actors = await cluster.launch(FSDPActor, CONFIG, BATCHES)
        one = groups(0)[0].samples[0]
        broken = np.full(len(one.response_ids), np.nan, np.float32)
        with pytest.raises(ra.WorkerError, match=r"log-prob of token 0 of sequence 0 is nan"):
            await actors.call(
                FSDPActor.check_weight_update_equal,
                [(one.prompt_ids, one.response_ids)],
                [broken],
            )


@pytest.mark.parametrize("silent", [0, 1])
async def test_a_step_without_any_signal_is_reported_with_those_that_have_one(
    silent: int, loop_kind: str
) -> None:
    work = groups(0)
    for group in work[2 * silent : 2 * silent + 2]:  # the groups of one of the two steps
        for one in group.samples:
            one.reward = 0.0
    [report], _ = await trained([work])
    assert report.steps == 2
    assert report.groups_without_signal == 2
    assert report.metrics["entropy"] > 0.0  # of the step that had a forward pass
