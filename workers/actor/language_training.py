"""`LanguageTrainingWorker`: one rank that trains a language model, actor or critic.

::

                          waits for                            unblocked by
    run_training          all groups of its share              the collector
                          the compute thread                   itself
    run_training_pipeline one micro-batch (in that thread)     the collector
    collectives           the other ranks                      they train the same number

Both trainings read the same iterator, one from the channel and one from what was collected, so
over the same samples they make the same gradients.

Exactly once: a group that was taken is trained or its iteration fails. With several epochs the
same samples come again, shuffled, under the advantages and the log-probs that they had: how stale
they are is counted where they arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec

from rlinf_async.backends.base import TrainingDiverged
from rlinf_async.backends.language import MicroBatch
from rlinf_async.channels import (
    BatchResizingIterator,
    Channel,
    Receiver,
)
from rlinf_async.channels.batching import BlockingBatches, HandlerFailed
from rlinf_async.messages.language import LanguageTrainReport, SampleGroup
from rlinf_async.workers.actor.epochs import is_spent, means, shuffled
from rlinf_async.workers.actor.groups import GroupOps, Tally
from rlinf_async.workers.actor.trainer_worker import TrainerWorker
from rlinf_async.workers.spans import Together

Batches = BatchResizingIterator[SampleGroup]
Waiting = Callable[[], AbstractContextManager[None]]
"""around each wait for a micro-batch"""

WAIT = "wait samples"


class LanguageTrainingWorker(TrainerWorker):
    """One rank of an actor or critic group; see `TrainerWorker` for what it is made with."""

    async def run_training(self, input_channel: Receiver[SampleGroup]) -> LanguageTrainReport:
        """Collect this rank's whole share of one iteration, then train on it.

        The model is onloaded only after the data is there. Raises:

            TrainingDiverged: the loss was not finite, or no step's gradient was.
            RuntimeError: a token is older than ``max_staleness``.
            BatchingError: groups do not make up the share.
        """
        began = asyncio.get_running_loop().time()
        with self.span(WAIT, iteration=self._trainer.version):
            collected = await self._collect(input_channel)
        waited = asyncio.get_running_loop().time() - began
        await self.onload()
        return await self.train_on(collected, waited)

    async def train_on(
        self, collected: Sequence[SampleGroup], waited: float = 0.0
    ) -> LanguageTrainReport:
        """Train on this rank's whole share of one iteration; raises what `run_training` does.

        In the order of the groups' numbers: which of them make one optimizer step does not depend
        on which came first. ``waited``: seconds that it took to come, for the report.
        """
        tally = self._tally()
        tally.wait_seconds = waited
        inside = sorted(collected, key=lambda group: group.group)
        batches = self._batches(_channel_of(inside, f"{self.name} collected").receiver, tally)
        return await self._iteration(batches, tally, arriving=False)

    async def skip_training(self, input_channel: Receiver[SampleGroup]) -> LanguageTrainReport:
        """Take this rank's share of one iteration and count the version up, without training.

        For an actor whose critic is still warming up.
        """
        tally, began = self._tally(), asyncio.get_running_loop().time()
        for group in await self._collect(input_channel):
            tally.add(group)
        await self.compute(self._trainer.end_iteration)
        tally.wait_seconds = asyncio.get_running_loop().time() - began
        return self._report(tally, [], seconds=0.0)

    async def run_training_pipeline(
        self, input_channel: Receiver[SampleGroup]
    ) -> LanguageTrainReport:
        """Train on one iteration while it arrives: micro-batch after micro-batch.

        The compute thread waits for each next one, so nothing else is computed here meanwhile: ask
        an inference worker for log-probs. Raises what `run_training` does.
        """
        await self.onload()
        tally = self._tally()
        batches = self._batches(input_channel, tally, key=self.rank)
        return await self._iteration(batches, tally, arriving=True)

    def compute_advantages_and_returns(self, batch: SampleGroup) -> SampleGroup:
        """The same samples with advantages and returns; those that have them are left alone."""
        samples = self._trainer.compute_advantages(batch.samples)
        return msgspec.structs.replace(batch, samples=samples)

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
            keep_batches=self._epochs > 1,
        )

    def _again(self, batch: SampleGroup, epoch: int) -> Batches:
        """The same samples, with their advantages, in another order."""
        sizes = self._sizes
        mixed = shuffled(batch, (self._trainer.version, epoch, self.rank))
        return BatchResizingIterator(
            _channel_of([mixed], f"{self.name} epoch {epoch}").receiver,
            GroupOps(),
            total_batch_size=sizes.total_batch_size,
            num_global_batches=sizes.num_global_batches,
            micro_batch_size=sizes.micro_batch_size,
            max_tokens_per_micro_batch=sizes.max_tokens_per_micro_batch,
            balance_window=sizes.balance_window,
            agree=self._trainer.agree,
        )

    async def _iteration(
        self, batches: Batches, tally: Tally, *, arriving: bool
    ) -> LanguageTrainReport:
        """Train on an iteration; ``arriving``: on what is still to come."""
        loop, iteration = asyncio.get_running_loop(), self._trainer.version
        training = Together(self.span, "train", iteration=iteration)
        began = loop.time()

        @contextmanager
        def waiting() -> Iterator[None]:
            with training.cut(), self.span(WAIT, iteration=iteration):
                since = loop.time()
                yield
                tally.wait_seconds += loop.time() - since

        with training.piece():
            steps = await self._epoch(batches, waiting if arriving else nullcontext)
            kept = batches.get_all_batches() if self._epochs > 1 else None
            for epoch in range(1, self._epochs):
                if kept is None or is_spent(steps[-self._sizes.num_global_batches :]):
                    break
                steps += await self._epoch(self._again(kept, epoch), nullcontext)
            self._check_learnt(steps)
            await self.compute(self._trainer.end_iteration)
        return self._report(tally, steps, seconds=loop.time() - began)

    async def _epoch(self, batches: Batches, waiting: Waiting) -> list[Mapping[str, float]]:
        """Go through the iteration once; the metrics of its optimizer steps."""
        view = batches.blocking(asyncio.get_running_loop())
        try:
            return await self.compute(self._train, batches, view, waiting)
        except HandlerFailed as failed:
            raise (failed.__cause__ or failed) from None
        finally:
            view.close()  # a cancelled call leaves the thread waiting for samples otherwise

    def _report(
        self, tally: Tally, steps: Sequence[Mapping[str, float]], *, seconds: float
    ) -> LanguageTrainReport:
        metrics = means(steps)
        if self._epochs > 1:
            metrics["epochs"] = len(steps) / self._sizes.num_global_batches
        return LanguageTrainReport(
            iteration=self._trainer.version - 1,
            version=self._trainer.version,
            rank=self.rank,
            metrics=metrics,
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
            wait_seconds=tally.wait_seconds,
            train_seconds=seconds,
        )

    def _train(
        self, batches: Batches, view: BlockingBatches[SampleGroup], waiting: Waiting
    ) -> list[Mapping[str, float]]:
        """Go through the iteration once. Runs in the compute thread."""
        steps = []
        for _ in range(self._sizes.num_global_batches):
            arrive = _micro_batches(batches, view, waiting)
            steps.append(self._trainer.training_step(arrive))
        if batches.queued_samples:
            raise RuntimeError(
                f"{batches.queued_samples} samples are left after an iteration of "
                f"{self._sizes.total_batch_size} on {self.name}: groups cross the border between "
                "two iterations; make the share a multiple of their size"
            )
        return steps

    def _check_learnt(self, steps: Sequence[Mapping[str, float]]) -> None:
        if all(step.get("skipped") for step in steps):
            raise TrainingDiverged(
                f"all {len(steps)} optimizer steps of iteration {self._trainer.version} had a "
                f"gradient norm that is not finite (last: {steps[-1].get('grad_norm')}): nothing "
                "was learnt. Lower the learning rate, or go on from the last checkpoint"
            )


def _channel_of(groups: Sequence[SampleGroup], name: str) -> Channel[SampleGroup]:
    """A channel of this process with these groups in it."""
    channel = Channel(SampleGroup, name=name, capacity=len(groups))
    for group in groups:
        channel.sender.put_nowait(group)
    return channel


def _micro_batches(
    batches: Batches, view: BlockingBatches[SampleGroup], waiting: Waiting
) -> Iterator[MicroBatch]:
    last = False
    micro_batches = view.global_batch()
    while not last:
        with waiting():
            micro_batch = next(micro_batches)
        last = batches.finished_global_batch
        yield MicroBatch(micro_batch.samples, last)
