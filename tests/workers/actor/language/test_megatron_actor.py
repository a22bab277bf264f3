"""`MegatronActor` over two stages: its steps by name, and training while samples arrive."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.algorithms.config import LanguageAdvantageConfig
from rlinf_async.channels import Receiver, Sender
from rlinf_async.channels.batching import BatchResizingIterator
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Sample, SampleGroup
from rlinf_async.workers.actor import FSDPActor, LanguageBatches, MegatronActor
from rlinf_async.workers.actor.iteration import GroupOps, channel_of
from rlinf_async.workers.base import WorkerError
from tests.backends.language.kit import QWEN3
from tests.workers.actor.language.kit import KEEPING, OPTIMIZER, Channels, groups, sample_of

pytest.importorskip("megatron.core")

BATCHES = LanguageBatches(samples=16, group_size=4, micro_batch_size=4)


class Noting(MegatronActor):
    """Says when its first micro-batch is computed, and what gradients it has."""

    async def setup(self) -> None:
        self._begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        await super().setup()

    def make_trainer(self) -> Any:
        trainer: Any = super().make_trainer()
        prepare = trainer.objective.prepare

        def noted(*args: Any, **options: Any) -> Any:
            self._loop.call_soon_threadsafe(self._begun.set)
            return prepare(*args, **options)

        trainer.objective.prepare = noted
        return trainer

    async def first_micro_batch(self) -> None:
        """Wait for it."""
        await self._begun.wait()

    async def gradients(self) -> dict[str, Floats]:
        """Take the gradients of this stage, which are zeroed."""
        trainer: Any = self._trainer
        found = {one.name: _gradient(one.parameter) for one in trainer.manager.held}
        trainer.manager.zero_grad()
        return found

    async def step_of_iterator(self, batch: SampleGroup) -> dict[str, float]:
        """Give `training_step` an iterator of this worker, over a batch that is there."""
        batches = BatchResizingIterator(
            channel_of([batch], "batches").receiver,
            GroupOps(),
            total_batch_size=2 * len(batch.samples),  # another global batch would come
            num_global_batches=2,
            micro_batch_size=4,
        )
        found = await self.training_step(batches)
        assert batches.finished_global_batch
        return found

    async def forward_step_works_here(self) -> bool:
        return callable((await self.get_forward_step_func()).__call__)


class Sleeping(MegatronActor):
    """Says whether it is offloaded, after all that its compute thread has to do."""

    async def sleeps(self) -> bool:
        await self.compute(int)
        return self._offloaded


def _gradient(parameter: Any) -> Floats:
    found: Floats = parameter.main_grad.detach().cpu().numpy().copy()
    return found


class Rollout(ra.Worker):
    """Sends one group for each permission to end it."""

    async def generate(
        self, made: list[SampleGroup], done: Sender[SampleGroup], may_end: Receiver[int]
    ) -> None:
        for one in made:
            with self.span("generate", group=one.group):
                await may_end.get()
                await done.put(one, key=0, weight=len(one.samples))


def megatron() -> Any:
    from rlinf_async.backends.language_training.config import LanguageModelConfig
    from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig

    described = LanguageModelConfig(config=QWEN3)
    cut = MegatronConfig(model=described, optimizer=OPTIMIZER, pp=2)
    return MegatronTrainerConfig(megatron=cut, reference=True, max_tokens_per_forward=40)


def ready(made: list[SampleGroup]) -> SampleGroup:
    """All samples of an iteration, with advantages."""
    from rlinf_async.algorithms.language.advantages import compute_group_advantages

    every = [
        sample
        for group in made
        for sample in compute_group_advantages(group.samples, LanguageAdvantageConfig())
    ]
    return SampleGroup(iteration=0, group=0, samples=every)


async def answers(channels: Channels, actors: Any, method: Any) -> dict[Any, list[Floats]]:
    """Previous and reference log-probs of 16 samples that stream through the actors."""
    asking = actors.call(method, channels.samples.receiver, channels.done.sender, True)
    for group in range(4):
        for index in range(4):
            await channels.samples.sender.put(sample_of(group, index))
    assert await asking == [16] * len(actors)
    found: list[Sample] = [one async for one in channels.done.receiver]
    assert len(found) == 16
    both: dict[Any, list[Floats]] = {}
    for one in found:
        assert one.prev_log_prob is not None
        assert one.ref_log_prob is not None
        both[one.request.name] = [one.prev_log_prob, one.ref_log_prob]
    return both


async def overlapping(
    cluster: ra.Cluster, channels: Channels, actors: ra.WorkerGroup[Noting]
) -> list[Any]:
    """Train an iteration whose last samples are only made once its first are trained on."""
    permissions = cluster.channel(int, name="permissions", capacity=4)
    rollout = await cluster.launch(Rollout)
    with channels.groups.sender.clone("rollout") as sender:
        making = rollout.call(Rollout.generate, groups(0), sender, permissions.receiver)
        training = actors.call(Noting.run_training_pipeline, channels.groups.receiver)
        await permissions.sender.put(0)
        await actors.call(Noting.first_micro_batch)  # both stages: but one group is there
        for group in range(1, 4):
            await permissions.sender.put(group)
        await making
        reports = await training
    assert [one.samples for one in reports] == [16, 0]
    spans = await cluster.spans()
    began = min(one.start for one in spans if one.name == "train")
    last = max(one.start + one.duration for one in spans if one.name == "generate")
    assert began < last
    return reports


async def gradients_of_both_modes(channels: Channels, actors: ra.WorkerGroup[Noting]) -> None:
    batch = ready(groups(1))
    units = sum(int(one.loss_mask.sum()) for one in batch.samples if one.scored)
    given = await actors.call(Noting.run_forward_backward, batch, False)
    collected = await actors.call(Noting.gradients)
    arriving = actors.call(Noting.run_forward_backward_iterator, channels.groups.receiver)
    await channels.send(groups(1)[::-1])
    pipelined = await arriving
    for one, metrics in zip(given, pipelined, strict=True):
        assert one.metrics["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
    for mine, theirs in zip(await actors.call(Noting.gradients), collected, strict=True):
        assert mine.keys() == theirs.keys()
        worst = max(float(np.abs(mine[name] - theirs[name]).max()) / units for name in mine)
        assert worst < 1e-6
        assert any(one.any() for one in mine.values())


async def names_that_groups_are_called_by(actors: ra.WorkerGroup[Noting]) -> None:
    """RLinf's methods, called on a group of workers in processes."""
    batch = ready(groups(3))
    for function in await actors.call(Noting.get_forward_step_func):
        elsewhere = rf"{re.escape(function.worker)} computes in its process"
        with pytest.raises(RuntimeError, match=elsewhere):
            function()
    assert await actors.call(Noting.forward_step_works_here) == [True, True]
    ranks = await actors.call(Noting.get_inference_weight_dst_ranks, 2, 2)
    assert ranks == [[0, 1, 2, 3], [0, 1, 2, 3]]
    with pytest.raises(WorkerError, match="inference_tp is 0 and inference_pp 1; both must be"):
        await actors.call(Noting.get_inference_weight_dst_ranks, 0, 1)
    bare = msgspec.structs.replace(batch, samples=groups(3)[0].samples)
    for filled in await actors.call(Noting.compute_advantages_and_returns, bare):
        assert all(one.advantage is not None for one in filled.samples)
    before = await actors.call(Noting.run_forward_backward, batch, False)
    steps = await actors.call(Noting.step_of_iterator, batch)
    for given, step in zip(before, steps, strict=True):
        assert step["loss"] == pytest.approx(given.metrics["loss"], abs=1e-6)
        assert step["update_success"] == 1.0
    iterator: Any = object()
    with pytest.raises(ra.BuildError, match="parameter 'batch'"):
        actors.call(Noting.training_step, iterator)


@pytest.mark.parametrize("loop_kind", ["uvloop"])
async def test_pipeline_stages_train_while_samples_arrive_and_answer_as_fsdp_does(
    loop_kind: str,
) -> None:
    async with ra.Cluster.local() as cluster:
        alone = await cluster.launch(FSDPActor, KEEPING, BATCHES)
        channels = Channels(cluster)
        expected = await answers(channels, alone, FSDPActor.run_inference)
        training = alone.call(FSDPActor.run_training, channels.groups.receiver)
        await channels.send(groups(0))
        [theirs] = await training
        tokens = [(one.prompt_ids, one.response_ids) for one in groups(1)[0].samples]
        [after] = await alone.call(FSDPActor.log_probs, tokens)
    async with ra.Cluster.process() as cluster:
        actors = await cluster.launch(
            Noting,
            megatron(),
            BATCHES,
            count=2,
            collective="gloo",
            env_vars={"OMP_NUM_THREADS": "1"},
        )
        channels = Channels(cluster)
        for name, log_probs in (await answers(channels, actors, Noting.run_inference)).items():
            for mine, same in zip(log_probs, expected[name], strict=True):
                np.testing.assert_allclose(mine, same, atol=1e-5)
        kept = channels.groups.receiver.clone("between two calls")  # a call closes its ends
        reports = await overlapping(cluster, channels, actors)
        for field in ("loss", "grad_norm", "entropy"):
            expected_number = theirs.metrics[field]
            assert reports[0].metrics[field] == pytest.approx(expected_number, rel=1e-4, abs=1e-5)
        given = SampleGroup(iteration=0, group=0, samples=groups(1)[0].samples)
        for one in given.samples:
            one.temperature = 1.0
        for found in await actors.call(Noting.run_forward_backward, given):
            for mine, same in zip(found.log_probs, after, strict=True):
                np.testing.assert_allclose(mine, same, atol=1e-4)
        await gradients_of_both_modes(channels, actors)
        with pytest.raises(WorkerError, match="a global batch has no samples on a rank"):
            await actors.call(Noting.training_step, SampleGroup(iteration=0, group=0, samples=[]))
        step = await actors.call(Noting.training_step, ready(groups(2)))
        assert step[0] == step[1]
        assert step[0]["grad_norm"] > 0.0
        assert step[0]["update_success"] == 1.0
        await names_that_groups_are_called_by(actors)
        iterator = Noting.run_forward_backward_iterator
        with pytest.raises(WorkerError, match=r"trains on what arrives; for log-probs alone"):
            await actors.call(iterator, channels.groups.receiver, True)
        kept.close()


async def test_a_rank_that_reads_nothing_is_onloaded_once_its_reader_has_the_data() -> None:
    async with ra.Cluster.process() as cluster:
        actors = await cluster.launch(
            Sleeping,
            megatron(),
            BATCHES,
            count=2,
            collective="gloo",
            env_vars={"OMP_NUM_THREADS": "1"},
        )
        channels = Channels(cluster)
        await actors.call(Sleeping.offload)
        training = actors.call(Sleeping.run_training, channels.groups.receiver)
        assert await actors.call(Sleeping.sleeps) == [True, True]
        await channels.send(groups(0))
        assert [one.samples for one in await training] == [16, 0]
        assert await actors.call(Sleeping.sleeps) == [False, False]


class OneSided(MegatronActor):
    """Has samples on one data rank only."""

    async def error(self, batch: SampleGroup) -> str:
        """What a step raises."""
        samples = batch.samples if self.rank == 0 else []
        try:
            await self.training_step(SampleGroup(iteration=0, group=0, samples=samples))
        except ValueError as error:
            return str(error)
        return ""


async def test_no_data_rank_waits_for_one_without_samples() -> None:
    from rlinf_async.backends.language_training.config import LanguageModelConfig
    from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig

    described = LanguageModelConfig(config=QWEN3)
    config = MegatronTrainerConfig(megatron=MegatronConfig(model=described, optimizer=OPTIMIZER))
    batch, env = ready(groups(0)), {"OMP_NUM_THREADS": "1"}
    async with ra.Cluster.process() as cluster:
        actors = await cluster.launch(
            OneSided, config, BATCHES, count=2, collective="gloo", env_vars=env
        )
        for error in await actors.call(OneSided.error, batch):
            assert error.startswith("a global batch has no samples on a rank")
        one, other = await actors.call(OneSided.training_step, batch)
        assert one["grad_norm"] == other["grad_norm"] > 0.0
