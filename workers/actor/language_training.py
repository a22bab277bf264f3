"""`LanguageTrainingWorker`: one rank that trains a language model, actor or critic.

::

                          waits for                            unblocked by
    run_training          all groups of its share              the collector
                          the compute thread                   itself
    run_training_pipeline one micro-batch (in that thread)     the collector
    collectives           the other ranks                      they train the same number

Both trainings read the same iterator, one from the channel and one from what was collected, so
over the same samples they make the same gradients.

Exactly once: a group that was taken is trained or its iteration fails.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rlinf_async.backends.base import TrainingDiverged
from rlinf_async.backends.language import MicroBatch
from rlinf_async.channels import (
    BatchResizingIterator,
    Channel,
    EndOfChannel,
    Receiver,
    Sender,
)
from rlinf_async.channels.batching import BlockingBatches, HandlerFailed
from rlinf_async.messages.language import LanguageTrainReport, Sample, SampleGroup
from rlinf_async.observe.files import explaining
from rlinf_async.workers.actor.config import LanguageBatches
from rlinf_async.workers.actor.errors import IncompleteShare
from rlinf_async.workers.actor.groups import GroupOps, Tally
from rlinf_async.workers.base import Worker

if TYPE_CHECKING:
    from rlinf_async.backends.language import LanguageTrainer

Batches = BatchResizingIterator[SampleGroup]


class LanguageTrainingWorker(Worker):
    """One rank of an actor or critic group.

    Args:
        trainer: configuration of the trainer backend, as its own Struct.
        batches: sizes of an iteration.
        backend: its registered name.
        resume: folder of the checkpoint to go on from.
        max_staleness: versions that a token's weights may be behind those that are trained; None:
            any number.
    """

    def __init__(
        self,
        trainer: Any,
        batches: LanguageBatches,
        *,
        backend: str,
        resume: str | None = None,
        max_staleness: int | None = None,
    ) -> None:
        self._config = trainer
        self._backend_name = backend
        self._resume = resume
        self._max_staleness = max_staleness
        self._sizes = batches.of_rank(self.world_size)
        self._offloaded = False

    async def setup(self) -> None:
        """Build the model, with the other ranks, and take the checkpoint to go on from."""
        if self.world_size > 1:
            await self.join_collective()
        self._trainer: LanguageTrainer = await self.compute(self.make_trainer)
        if self._resume is not None:
            await self.load_checkpoint(self._resume)

    def make_trainer(self) -> LanguageTrainer:
        """Build the trainer. Runs in the compute thread; override it to bring your own."""
        from rlinf_async.backends.registry import load_language_trainer

        return load_language_trainer(self._backend_name)(self._config, self.world_size, self.rank)

    async def version(self) -> int:
        """How many iterations the model was trained for."""
        return self._trainer.version

    async def run_training(self, input_channel: Receiver[SampleGroup]) -> LanguageTrainReport:
        """Collect this rank's whole share of one iteration, then train on it.

        The model is onloaded only after the data is there. Raises:

            TrainingDiverged: the loss was not finite, or no step's gradient was.
            RuntimeError: a token is older than ``max_staleness``.
            BatchingError: groups do not make up the share.
        """
        loop, tally = asyncio.get_running_loop(), self._tally()
        began = loop.time()
        with self.span("wait samples", iteration=self._trainer.version):
            collected = await self._collect(input_channel)
        waited = loop.time() - began
        await self.onload()
        there = Channel(SampleGroup, name=f"{self.name} collected", capacity=len(collected))
        for group in collected:
            there.sender.put_nowait(group)
        batches = self._batches(there.receiver, tally)
        return await self._iteration(batches, tally, waited)

    async def run_training_pipeline(
        self, input_channel: Receiver[SampleGroup]
    ) -> LanguageTrainReport:
        """Train on one iteration while it arrives: micro-batch after micro-batch.

        The compute thread waits for each next one, so nothing else is computed here meanwhile: ask
        an inference worker for log-probs. Raises what `run_training` does.
        """
        await self.onload()
        tally = self._tally()
        return await self._iteration(self._batches(input_channel, tally, key=self.rank), tally, 0.0)

    def compute_advantages_and_returns(self, batch: SampleGroup) -> SampleGroup:
        """The same samples with advantages and returns; those that have them are left alone."""
        samples = self._trainer.compute_advantages(batch.samples)
        return msgspec.structs.replace(batch, samples=samples)

    async def offload(self) -> None:
        """Give the device's memory back."""
        if not self._offloaded:
            with self.span("offload"):
                await self.compute(self._trainer.offload)
            self._offloaded = True

    async def onload(self) -> None:
        """Take weights and optimizer back to the device, if they are not there."""
        if self._offloaded:
            with self.span("onload"):
                await self.compute(self._trainer.onload)
            self._offloaded = False

    async def save_checkpoint(self, path: str, extra: Mapping[str, Any] | None = None) -> str:
        """Write a checkpoint folder, every rank its own shard; returns its path.

        ``extra``: plain values of this rank's own, which `load_checkpoint` gives back.
        """
        folder = Path(path)
        with self.span("checkpoint"), explaining("write the checkpoint", folder):
            await self.compute(self._trainer.save_checkpoint, folder, extra)
        return path

    async def load_checkpoint(self, path: str) -> list[dict[str, object]]:
        """Go on where a checkpoint was written, by any number of ranks; their extras."""
        return await self.compute(self._trainer.load_checkpoint, Path(path))

    async def pass_through(
        self,
        input_channel: Receiver[Sample],
        output_channel: Sender[Sample],
        answer: Callable[[list[Sample]], list[Sample]],
    ) -> int:
        """Send this rank's share of one iteration on, answered batch by batch; their number.

        One rank alone takes what is ready. The ranks of a sharded model compute together: each
        takes equally many samples, and waits for the others'. Samples are leased until they were
        sent on. Raises `IncompleteShare` when the channel ends before.
        """
        await self.onload()
        left = self._sizes.total_batch_size
        size = self._sizes.micro_batch_size or self._sizes.global_batch_size
        least = 1 if self.world_size == 1 else None
        try:
            while left > 0:
                async with input_channel.lease(weight=min(size, left), at_least=least) as batch:
                    with self.span("inference", samples=len(batch)):
                        done = await self.compute(answer, list(batch))
                    for sample in done:
                        await output_channel.put(sample)
                left -= len(batch)
        except EndOfChannel:
            raise IncompleteShare(
                f"the channel {input_channel.channel_name!r} ended {left} samples before the "
                f"{self._sizes.total_batch_size} of this iteration on {self.name}"
            ) from None
        return self._sizes.total_batch_size

    def _tally(self) -> Tally:
        return Tally(self._trainer.version, self._max_staleness)

    async def _collect(self, channel: Receiver[SampleGroup]) -> list[SampleGroup]:
        collected: list[SampleGroup] = []
        missing = self._sizes.total_batch_size
        while missing > 0:
            collected.append(await channel.get(key=self.rank))
            missing -= len(collected[-1].samples)
        return collected

    def _batches(
        self, receiver: Receiver[SampleGroup], tally: Tally, key: int | None = None
    ) -> Batches:
        trainer, sizes = self._trainer, self._sizes

        def arrived(group: SampleGroup) -> SampleGroup:
            tally.add(group)
            return self.compute_advantages_and_returns(group)

        def normalized(batch: SampleGroup) -> SampleGroup:
            samples = trainer.normalize_advantages(batch.samples)
            return msgspec.structs.replace(batch, samples=samples)

        return BatchResizingIterator(
            receiver,
            GroupOps(),
            total_batch_size=sizes.total_batch_size,
            num_global_batches=sizes.num_global_batches,
            micro_batch_size=sizes.micro_batch_size,
            max_tokens_per_micro_batch=sizes.max_tokens_per_micro_batch,
            balance_window=sizes.balance_window,
            on_batch=arrived,
            on_global_batch=normalized if trainer.normalizes else None,
            agree=trainer.agree,
            key=key,
        )

    async def _iteration(
        self, batches: Batches, tally: Tally, waited: float
    ) -> LanguageTrainReport:
        loop, iteration = asyncio.get_running_loop(), self._trainer.version
        view, began = batches.blocking(loop), loop.time()
        try:
            with self.span("train", iteration=iteration):
                steps = await self.compute(self._train, batches, view)
        except HandlerFailed as failed:
            raise (failed.__cause__ or failed) from None
        finally:
            view.close()  # a cancelled call leaves the thread waiting for samples otherwise
        return LanguageTrainReport(
            iteration=iteration,
            version=self._trainer.version,
            rank=self.rank,
            metrics=_means(steps),
            steps=len(steps),
            samples=tally.samples,
            unscored=tally.unscored,
            groups=tally.groups,
            groups_without_signal=tally.without_signal,
            prompt_tokens=tally.prompt_tokens,
            response_tokens=tally.response_tokens,
            reward_mean=tally.reward_mean,
            lag_mean=tally.lag_mean,
            lag_max=tally.lag_max,
            wait_seconds=waited,
            train_seconds=loop.time() - began,
        )

    def _train(
        self, batches: Batches, view: BlockingBatches[SampleGroup]
    ) -> list[Mapping[str, float]]:
        """Train one iteration. Runs in the compute thread."""
        count = self._sizes.num_global_batches
        steps = [self._trainer.training_step(_micro_batches(batches, view)) for _ in range(count)]
        if batches.queued_samples:
            raise RuntimeError(
                f"{batches.queued_samples} samples are left after an iteration of "
                f"{self._sizes.total_batch_size} on {self.name}: groups cross the border between "
                "two iterations; make the share a multiple of their size"
            )
        if all(step.get("skipped") for step in steps):
            raise TrainingDiverged(
                f"all {count} optimizer steps of iteration {self._trainer.version} had a gradient "
                f"norm that is not finite (last: {steps[-1].get('grad_norm')}): nothing was "
                "learnt. Lower the learning rate, or go on from the last checkpoint"
            )
        self._trainer.end_iteration()
        return steps


def _micro_batches(batches: Batches, view: BlockingBatches[SampleGroup]) -> Iterator[MicroBatch]:
    for micro_batch in view.global_batch():
        yield MicroBatch(micro_batch.samples, batches.finished_global_batch)


def _means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the steps that measured it: one in which no sample had a gradient has less to
    tell. Of the gradient norm only over those where it is finite, if there are any."""
    means = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        numbers = [step[name] for step in steps if name in step]
        if name == "grad_norm":
            numbers = [number for number in numbers if math.isfinite(number)] or numbers
        means[name] = sum(numbers) / len(numbers)
    return means
