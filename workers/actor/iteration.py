"""`Iteration`: one rank's training on the sample groups of one iteration.

::

    SampleGroup --> [ statistics, advantages ] --> micro-batches --> optimizer steps --> report
                                                       ^     |
                                                       |     v     (again, shuffled, if epochs > 1)
                                                       samples

                          waits for                            unblocked by
    train                 one micro-batch (in the compute      the collector, where the groups
                          thread)                              come from a channel
                          the compute thread                   itself
    collectives           the other ranks                      they train the same number
    train_dispatched      who trains the next global batch     `ChangingRank.at_boundary`

One call of the compute thread makes one optimizer step. Whether the groups were collected or still
arrive, they go through the same iterator, so the same samples make the same gradients. Where the
loss compares with the weights that the iteration began with, that call takes the whole global
batch, and computes their log-probs first.

Exactly once: a group that was taken is trained or its iteration fails. With several epochs the
same samples come again, shuffled, under the advantages and the log-probs that they had: how stale
they are is counted where they arrive.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NoReturn, Protocol

import msgspec
import numpy as np

from rlinf_async.backends.base import TrainingDiverged
from rlinf_async.backends.language import (
    LanguageTrainer,
    MicroBatch,
    ReadsForOthers,
    require_finite,
)
from rlinf_async.channels import BatchResizingIterator, Channel, Receiver
from rlinf_async.channels.batching import BatchSizes, BlockingBatches, HandlerFailed
from rlinf_async.messages.language import LanguageTrainReport, SampleGroup, TrainingSample
from rlinf_async.workers.base import MergedSpan, Worker

SEVERAL = -1
"""the group number of a batch with samples of several"""


class GroupOps:
    """`BatchOps` of sample groups: a batch is a `SampleGroup` of any samples."""

    def size(self, batch: SampleGroup, /) -> int:
        return len(batch.samples)

    def slice(self, batch: SampleGroup, start: int, stop: int, /) -> SampleGroup:
        return msgspec.structs.replace(batch, samples=batch.samples[start:stop])

    def concat(self, batches: Sequence[SampleGroup], /) -> SampleGroup:
        samples = [sample for batch in batches for sample in batch.samples]
        return SampleGroup(iteration=batches[0].iteration, group=SEVERAL, samples=samples)

    def lengths(self, batch: SampleGroup, /) -> Sequence[int]:
        return [sample.tokens for sample in batch.samples]


class ArrivalStatistics:
    """Statistics of the samples of one iteration that arrived on one rank.

    Raises from `add` `RuntimeError` for a token that is older than ``max_staleness`` versions
    (None: any may be) or newer than the weights that are trained, and `ModelOutputError` for a
    log-prob that is not finite.
    """

    def __init__(self, version: int, max_staleness: int | None) -> None:
        self._version = version
        self._limit = max_staleness
        self.groups = self.without_signal = self.samples = self.unscored = 0
        self.prompt_tokens = self.response_tokens = 0
        self.lag_max = self._lag_total = 0
        self.wait_seconds = 0.0
        """seconds that the trainer was idle until they arrived"""
        self._rewards: list[float] = []

    @property
    def lag_mean(self) -> float:
        """Mean over the tokens that were drawn, in versions."""
        return self._lag_total / max(self.response_tokens, 1)

    @property
    def reward_mean(self) -> float:
        """Mean over scored samples; NaN without any."""
        return float(np.mean(self._rewards)) if self._rewards else float("nan")

    def add(self, group: SampleGroup) -> None:
        """Add a group."""
        rewards = [sample.reward for sample in group.samples if sample.scored]
        signals = {sample.rewards for sample in group.samples if sample.scored}
        for sample in group.samples:
            _check_log_probs(sample)
            lags = self._version - sample.version[sample.drawn_mask]
            if len(lags):
                self._check(group, int(lags.min()), int(lags.max()))
                self.lag_max = max(self.lag_max, int(lags.max()))
                self._lag_total += int(lags.sum())
            self.prompt_tokens += sample.tokens - len(lags)
            self.response_tokens += len(lags)
        self._rewards += rewards
        self.groups += 1
        self.without_signal += len(signals) <= 1
        self.samples += len(group.samples)
        self.unscored += len(group.samples) - len(rewards)

    def _check(self, group: SampleGroup, newest: int, oldest: int) -> None:
        if newest < 0 or (self._limit is not None and oldest > self._limit):
            allowed = "any" if self._limit is None else str(self._limit)
            raise RuntimeError(
                f"group {group.group}, trained at version {self._version}, holds tokens that are "
                f"{newest} to {oldest} versions old, but max_staleness is {allowed}: its requests "
                "were admitted too early, or weights came from elsewhere"
            )


def _check_log_probs(sample: TrainingSample) -> None:
    """Raise `ModelOutputError` for a log-prob in the loss that is not finite."""
    if not sample.scored:
        return
    name, mask = f"sample {sample.group}/{sample.index}", sample.loss_mask
    teacher = sample.teacher
    for log_prob, whose in (
        (sample.log_prob, "the engine that generated it"),
        (sample.prev_log_prob, "the forward pass that recomputed it"),
        (sample.ref_log_prob, "the reference's forward pass"),
        (None if teacher is None else teacher.drawn, "the teacher's forward pass"),
    ):
        if log_prob is not None:
            trained = np.where(mask, log_prob, np.float32(0.0))
            require_finite(trained, sample.response_ids, whose, name)


def with_advantages(trainer: LanguageTrainer, group: SampleGroup) -> SampleGroup:
    """Return the same samples with advantages and returns; existing ones are kept."""
    samples = trainer.compute_advantages(group.samples)
    return msgspec.structs.replace(group, samples=samples)


Batches = BatchResizingIterator[SampleGroup]
Waiting = Callable[[], AbstractContextManager[None]]
"""around each wait for a micro-batch"""


def is_spent(steps: Sequence[Mapping[str, float]]) -> bool:
    """Whether the early stop (``early_stop_ratio``) stopped every sample of an epoch.

    Another epoch would then have no gradient.
    """
    return all(step.get("early_stopped", 0.0) >= 1.0 for step in steps)


def means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means over the steps that measured it: one without any gradient has fewer metrics.

    Of the gradient norm only over those where it is finite, if there are any.
    """
    found = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        numbers = [step[name] for step in steps if name in step]
        if name == "grad_norm":
            numbers = [number for number in numbers if math.isfinite(number)] or numbers
        found[name] = sum(numbers) / len(numbers)
    return found


def channel_of(groups: Sequence[SampleGroup], name: str) -> Channel[SampleGroup]:
    """Return a channel of this process with these groups in it."""
    channel = Channel(SampleGroup, name=name, capacity=len(groups))
    for group in groups:
        channel.sender.put_nowait(group)
    return channel


async def all_micro_batches(batches: Batches, waiting: Waiting) -> list[MicroBatch]:
    """Wait for a whole global batch on the loop."""
    with waiting():
        try:
            parts = [one.samples async for one in batches.global_batch()]
        except HandlerFailed as failed:
            raise (failed.__cause__ or failed) from None
    last = len(parts) - 1
    return [MicroBatch(one, at == last, len(parts)) for at, one in enumerate(parts)]


def arriving_micro_batches(
    batches: Batches, view: BlockingBatches[SampleGroup], waiting: Waiting, sizes: BatchSizes
) -> Iterator[MicroBatch]:
    size = sizes.micro_batch_size
    count = None if size is None else sizes.global_batch_size // size
    last = False
    micro_batches = view.global_batch()
    while not last:
        with waiting():
            try:
                micro_batch = next(micro_batches)
            except HandlerFailed as failed:
                raise (failed.__cause__ or failed) from None
        last = batches.finished_global_batch
        yield MicroBatch(micro_batch.samples, last, count)


Step = Callable[[Iterable[MicroBatch]], Mapping[str, float]]
"""what is done with the micro-batches of a global batch"""

WAIT = "wait samples"
MICRO_BATCH = "micro-batch"


class ChangingRank(Protocol):
    """A rank whose strategy may change between two global batches."""

    @property
    def active(self) -> bool:
        """Whether this rank trains the next global batch."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this rank is the one whose decisions the others follow."""
        ...

    @property
    def sizes(self) -> BatchSizes:
        """The sizes of its share, while it trains."""
        ...

    @property
    def done(self) -> int:
        """Global batches of the iteration that are trained, over all epochs."""
        ...

    async def at_boundary(self, done: int, tokens: int, seconds: float) -> None:
        """Wait until it is known who trains the next global batch. ``done`` are trained; this rank
        trained the last one, with ``tokens`` in ``seconds``."""
        ...

    async def again(self, samples: SampleGroup) -> None:
        """Send trained samples on, which another epoch may give to other ranks."""
        ...

    def end_iteration(self) -> None:
        """Count the iteration, trained or not."""
        ...


class Iteration:
    """One iteration on one rank.

    Args:
        worker: where it runs.
        trainer: trainer of the model.
        sizes: sizes of this rank's share.
        epochs: how often the share is gone through.
        max_staleness: versions that a token's weights may be behind those that are trained; None:
            any number.
        step: makes an optimizer step; the trainer's own when left out.
    """

    def __init__(
        self,
        worker: Worker,
        trainer: LanguageTrainer,
        sizes: BatchSizes,
        *,
        epochs: int,
        max_staleness: int | None,
        step: Step | None = None,
    ) -> None:
        self._worker, self._trainer = worker, trainer
        self._step = step or trainer.training_step
        self._sizes, self._epochs = sizes, epochs
        self._number = trainer.version
        self._data = trainer.data_rank
        self._seconds = 0.0
        self._tokens = 0
        """tokens trained on this rank"""
        self._busy = 0.0
        self._left_out = 0
        """samples that the loss leaves out, by their log-probs"""
        """seconds of training, without waits for samples"""
        self.arrived = ArrivalStatistics(trainer.version, max_staleness)

    async def collect(self, groups: Receiver[SampleGroup]) -> list[SampleGroup]:
        """Receive this rank's share, in the order of arrival; nothing where another rank does."""
        if not self._data.is_io:
            return []
        began = asyncio.get_running_loop().time()
        collected: list[SampleGroup] = []
        missing = self._sizes.total_batch_size
        with self._worker.span(WAIT, iteration=self._number):
            while missing > 0:
                collected.append(await groups.get(key=self._data.rank))
                missing -= len(collected[-1].samples)
        self.arrived.wait_seconds += asyncio.get_running_loop().time() - began
        return collected

    async def cannot_train(self, error: Exception) -> NoReturn:
        """Raise an error of reading; on ranks that wait for this one's samples, too, if there are
        any: they train at this time."""
        if isinstance(self._trainer, ReadsForOthers):
            await self._worker.compute(self._trainer.cannot_train, error)
        raise error

    async def train(self, collected: Sequence[SampleGroup]) -> LanguageTrainReport:
        """Train on this rank's whole share.

        In the order of the groups' numbers: which of them make one optimizer step does not depend
        on which came first.
        """
        if not self._data.is_io:
            return await self._train(None, arriving=False)
        ordered = sorted(collected, key=lambda group: group.group)
        receiver = channel_of(ordered, f"{self._worker.name} collected").receiver
        return await self._train(self._batches(receiver), arriving=False)

    async def train_arriving(self, groups: Receiver[SampleGroup]) -> LanguageTrainReport:
        """Train on this rank's share while it arrives."""
        batches = self._batches(groups, key=self._data.rank) if self._data.is_io else None
        return await self._train(batches, arriving=True)

    async def compute_arriving(self, groups: Receiver[SampleGroup]) -> list[Mapping[str, float]]:
        """Give each global batch to ``step`` while it arrives; count no version."""
        batches = self._batches(groups, key=self._data.rank) if self._data.is_io else None
        return await self._epoch(batches, nullcontext, 0)

    async def compute_next(self, batches: Batches) -> Mapping[str, float]:
        """Give the next global batch of an iterator to ``step``; count no version.

        A rank that does not read its samples leaves the iterator alone.
        """
        mine = batches if self._data.is_io else None
        loop = asyncio.get_running_loop()
        return await self._stepped(mine, nullcontext, emptied=None, first=None, loop=loop)

    async def skip(self, collected: Sequence[SampleGroup]) -> LanguageTrainReport:
        """Count the version up, without training."""
        for group in collected:
            self.arrived.add(group)
        await self._worker.compute(self._trainer.end_iteration)
        return self.report([], seconds=0.0)

    async def train_dispatched(
        self, groups: Receiver[SampleGroup], rank: ChangingRank
    ) -> LanguageTrainReport:
        """Train on samples that are dispatched for one global batch after the other.

        Between two of them the strategy may change: this rank may begin or cease to train, and its
        part of the next global batch may have another size. Samples of a global batch are sent only
        once it is known who trains it, so none is queued here when that changes. Those of the first
        epoch go back after each global batch, with their advantages: further epochs give them out
        again, shuffled over all ranks.
        """
        steps: list[Mapping[str, float]] = []
        batches: Batches | None = None
        of_epoch = self._sizes.num_global_batches
        with self._measured(arriving=True) as waiting:
            while rank.done < of_epoch * self._epochs:
                epoch, position = divmod(rank.done, of_epoch)
                tokens, busy = self._tokens, self._busy
                if rank.active:
                    if not position:
                        batches = None
                    try:
                        batches = self._dispatched(batches, groups, rank.sizes, epoch)
                    except RuntimeError as error:
                        await self.cannot_train(error)
                    steps.append(await self._global_batch(batches, waiting, position, epoch))
                    await self._send_again(batches, rank, epoch)
                else:
                    batches = None
                ends = position + 1 == of_epoch and rank.leads and is_spent(steps[-of_epoch:])
                if ends or rank.done + 1 == of_epoch * self._epochs:
                    break
                await rank.at_boundary(rank.done + 1, self._tokens - tokens, self._busy - busy)
            self._check_learnt(steps)
            await self._worker.compute(rank.end_iteration)
        return self.report(steps, seconds=self._seconds)

    async def _send_again(self, batches: Batches | None, rank: ChangingRank, epoch: int) -> None:
        """Send the samples of a global batch of the first of several epochs back."""
        if batches is None or epoch or self._epochs == 1:
            return
        kept = batches.get_all_batches()
        assert kept is not None
        await rank.again(kept)

    def _dispatched(
        self, batches: Batches | None, groups: Receiver[SampleGroup], sizes: BatchSizes, epoch: int
    ) -> Batches | None:
        """Return the iterator for the next global batch; None: another rank reads the samples."""
        data = self._trainer.data_rank
        if not data.is_io:
            return None
        if batches is None or data != self._data:
            self._data, self._sizes = data, sizes
            if epoch:
                return self._plain_batches(groups, key=data.rank)
            return self._batches(groups, key=data.rank)
        if sizes != self._sizes:
            self._check_queue(batches)
            self._sizes = sizes
            batches.reset_total_batch_size(sizes.total_batch_size)
        return batches

    async def _train(self, batches: Batches | None, *, arriving: bool) -> LanguageTrainReport:
        """Train; ``arriving``: on samples that are still to come. None: another rank reads them."""
        with self._measured(arriving=arriving) as waiting:
            steps = await self._epoch(batches, waiting, 0)
            kept = batches.get_all_batches() if batches is not None and self._epochs > 1 else None
            for epoch in range(1, self._epochs):
                if is_spent(steps[-self._sizes.num_global_batches :]):
                    break
                again = None if kept is None else self._shuffled(kept, epoch)
                steps += await self._epoch(again, nullcontext, epoch)
            self._check_learnt(steps)
            await self._worker.compute(self._trainer.end_iteration)
        return self.report(steps, seconds=self._seconds)

    @contextmanager
    def _measured(self, *, arriving: bool) -> Iterator[Waiting]:
        """Measure the block as training, and, of samples that arrive, the waits for them."""
        loop = asyncio.get_running_loop()
        training = MergedSpan(self._worker.span, "train", iteration=self._number)
        began = loop.time()

        @contextmanager
        def waiting() -> Iterator[None]:
            with training.cut(), self._worker.span(WAIT, iteration=self._number):
                since = loop.time()
                yield
                self.arrived.wait_seconds += loop.time() - since

        with training.piece():
            yield waiting if arriving else nullcontext
        self._seconds = loop.time() - began

    async def _epoch(
        self, batches: Batches | None, waiting: Waiting, epoch: int
    ) -> list[Mapping[str, float]]:
        """Go through the share once; return the metrics of its optimizer steps."""
        return [
            await self._global_batch(batches, waiting, number, epoch)
            for number in range(self._sizes.num_global_batches)
        ]

    async def _global_batch(
        self, batches: Batches | None, waiting: Waiting, number: int, epoch: int
    ) -> Mapping[str, float]:
        """Make one optimizer step. None: on samples that another rank reads.

        No samples may be left after the last global batch of an epoch.
        """
        loop = asyncio.get_running_loop()
        began, waited = loop.time(), self.arrived.wait_seconds
        ends_epoch = number + 1 == self._sizes.num_global_batches
        first = number if self._trainer.recomputes and not epoch else None
        emptied = batches if ends_epoch else None
        try:
            return await self._stepped(batches, waiting, emptied, first, loop)
        finally:
            self._busy += loop.time() - began - (self.arrived.wait_seconds - waited)

    async def _stepped(
        self,
        batches: Batches | None,
        waiting: Waiting,
        emptied: Batches | None,
        first: int | None,
        loop: asyncio.AbstractEventLoop,
    ) -> Mapping[str, float]:
        """Make one optimizer step.

        Of ``emptied`` nothing may be left behind. ``first``: number of the global batch, if its
        log-probs are computed before.
        """
        step = partial(self._step_on, emptied=emptied, first=first)
        if batches is None:
            return await self._worker.compute(step, ())
        if getattr(loop, "virtual", False):  # it computes inline: nothing could be waited for there
            return await self._worker.compute(step, await all_micro_batches(batches, waiting))
        view = batches.blocking(loop)
        try:
            arriving = arriving_micro_batches(batches, view, waiting, batches.sizes)
            return await self._worker.compute(step, arriving)
        finally:
            view.close()  # a cancelled call leaves the thread waiting for samples otherwise

    def _step_on(
        self, micro_batches: Iterable[MicroBatch], *, emptied: Batches | None, first: int | None
    ) -> Mapping[str, float]:
        """Make one optimizer step, in the compute thread; see `_stepped`."""
        if first is not None:
            micro_batches = self._recomputed(micro_batches, first)
        return self._step(self._counted(micro_batches, emptied))

    def _recomputed(self, micro_batches: Iterable[MicroBatch], number: int) -> Iterable[MicroBatch]:
        """Return all micro-batches of a global batch, with log-probs under the weights that the
        iteration began with. They stay with the samples for further epochs."""
        there: list[MicroBatch] = []
        failed: Exception | None = None
        try:
            there.extend(micro_batches)
        except Exception as error:  # raised where the others wait for micro-batches, too
            failed, there = error, []
        samples = [sample for one in there for sample in one.samples]
        found = self._trainer.first_log_probs(
            samples, batch=number, batches=self._sizes.num_global_batches
        )
        if failed is not None:
            return _raising(failed)
        if samples:  # else another rank reads them
            for sample, log_prob in zip(samples, found, strict=True):
                sample.prev_log_prob = log_prob
            self._left_out += self._trainer.leave_out(samples)
        return there

    def _counted(
        self, micro_batches: Iterable[MicroBatch], emptied: Batches | None
    ) -> Iterator[MicroBatch]:
        """Count tokens, and record what becomes of each micro-batch until the next is asked for.

        ``emptied`` is looked at before any rank takes the step.
        """
        for one in micro_batches:
            tokens = sum(sample.tokens for sample in one.samples)
            self._tokens += tokens
            if one.is_last and emptied is not None:
                self._check_queue(emptied)
            with self._worker.span(
                MICRO_BATCH, iteration=self._number, samples=len(one.samples), tokens=tokens
            ):
                yield one

    def _check_queue(self, batches: Batches) -> None:
        if batches.queued_samples:
            raise RuntimeError(
                f"{batches.queued_samples} samples are left after an iteration of "
                f"{self._sizes.total_batch_size} on {self._worker.name}: groups cross the border "
                "between two iterations; make the share a multiple of their size"
            )

    def _batches(self, receiver: Receiver[SampleGroup], key: int | None = None) -> Batches:
        trainer = self._trainer

        def arrived(group: SampleGroup) -> SampleGroup:
            self.arrived.add(group)
            return with_advantages(trainer, group)

        def normalized(batch: SampleGroup) -> SampleGroup:
            samples = trainer.normalize_advantages(batch.samples)
            return msgspec.structs.replace(batch, samples=samples)

        return BatchResizingIterator(
            receiver,
            GroupOps(),
            total_batch_size=self._sizes.total_batch_size,
            num_global_batches=self._sizes.num_global_batches,
            micro_batch_size=self._sizes.micro_batch_size,
            max_tokens_per_micro_batch=self._sizes.max_tokens_per_micro_batch,
            balance_window=self._sizes.balance_window,
            on_batch=arrived,
            on_global_batch=normalized if trainer.normalizes else None,
            agree=trainer.agree,
            key=key,
            keep_batches=self._epochs > 1,
        )

    def _shuffled(self, batch: SampleGroup, epoch: int) -> Batches:
        """Return the same samples, with their advantages, in a random order.

        It depends on version, epoch and data rank alone.
        """
        seed = (self._trainer.version, epoch, self._data.rank)
        order = np.random.default_rng(seed).permutation(len(batch.samples))
        shuffled = msgspec.structs.replace(batch, samples=[batch.samples[at] for at in order])
        return self._plain_batches(
            channel_of([shuffled], f"{self._worker.name} epoch {epoch}").receiver
        )

    def _plain_batches(self, receiver: Receiver[SampleGroup], key: int | None = None) -> Batches:
        """Iterate over samples that have their advantages and were counted."""
        return BatchResizingIterator(
            receiver,
            GroupOps(),
            total_batch_size=self._sizes.total_batch_size,
            num_global_batches=self._sizes.num_global_batches,
            micro_batch_size=self._sizes.micro_batch_size,
            max_tokens_per_micro_batch=self._sizes.max_tokens_per_micro_batch,
            balance_window=self._sizes.balance_window,
            agree=self._trainer.agree,
            key=key,
        )

    def _check_learnt(self, steps: Sequence[Mapping[str, float]]) -> None:
        if steps and all(step.get("skipped") for step in steps):
            raise TrainingDiverged(
                f"all {len(steps)} optimizer steps of iteration {self._number} had a gradient norm "
                f"that is not finite (last: {steps[-1].get('grad_norm')}): nothing was learnt. "
                "Lower the learning rate, or go on from the last checkpoint"
            )

    def report(
        self, steps: Sequence[Mapping[str, float]], *, seconds: float
    ) -> LanguageTrainReport:
        """Return the report of an iteration that was trained in ``seconds``, or skipped."""
        metrics = means(steps)
        if self._epochs > 1:
            metrics["epochs"] = len(steps) / self._sizes.num_global_batches
        arrived = self.arrived
        return LanguageTrainReport(
            iteration=self._trainer.version - 1,
            version=self._trainer.version,
            rank=self._worker.rank,
            metrics=metrics,
            steps=len(steps),
            samples=arrived.samples,
            unscored=arrived.unscored,
            left_out=self._left_out,
            groups=arrived.groups,
            groups_without_signal=arrived.without_signal,
            prompt_tokens=arrived.prompt_tokens,
            response_tokens=arrived.response_tokens,
            reward_mean=arrived.reward_mean,
            lag_mean=arrived.lag_mean,
            lag_max=arrived.lag_max,
            wait_seconds=arrived.wait_seconds,
            train_seconds=seconds,
        )


def _raising(error: Exception) -> Iterator[MicroBatch]:
    raise error
    yield  # micro-batches, of which there are none
