"""`LanguageTrainingWorker`: one rank that trains a language model, of an actor or a critic;
`LanguageActor`, which publishes every version of it; `SupervisedWorker`, a short phase before.

::

                            waits for                          unblocked by
    run_training            all groups of its share            the collector; the rank that reads
                            the compute thread                 itself
    run_training_pipeline   one micro-batch (in that thread)   the collector
    offload, onload         the compute thread                 itself
    pass_through            a sample                           its sender: rollout workers
                            room for it                        its receiver: reward workers

One call trains one iteration: `Iteration`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rlinf_async.backends.language import LanguageTrainer, ReadsForOthers
from rlinf_async.backends.parts import DEFAULT_LANGUAGE_TRAINER, language_trainers
from rlinf_async.channels import (
    ChannelError,
    EndOfChannel,
    LatestSender,
    Receiver,
    Sender,
)
from rlinf_async.channels.batching import BatchSizes, rank_share
from rlinf_async.channels.wire import shared_bytes
from rlinf_async.config.counts import check_bounds
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import (
    Example,
    LanguageTrainReport,
    Sample,
    SampleGroup,
    Tokens,
)
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.parallel import check_batch
from rlinf_async.workers.actor.iteration import Iteration, with_advantages
from rlinf_async.workers.actor.training import (
    LONGEST_POLL,
    IncompleteShare,
    TrainingWorker,
    WeightsDisagree,
)
from rlinf_async.workers.base import GroupStore, Worker
from rlinf_async.workers.inference import bare_sample, with_log_probs


class SupervisedWorker(Worker):
    """One rank of a short supervised phase.

    Args:
        trainer: configuration of the language trainer.
        phase: `SupervisedConfig` of the phase.
        backend: the trainer's registered name.
    """

    def __init__(self, trainer: Any, phase: Any, backend: str = DEFAULT_LANGUAGE_TRAINER) -> None:
        self._backend_name = backend
        self._config = trainer
        self._phase = phase

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        name = arguments.get("backend", DEFAULT_LANGUAGE_TRAINER)
        return language_trainers.load(name).slow_imports

    async def setup(self) -> None:
        if self.world_size > 1:
            await self.join_collective()

    async def fit(self, examples: list[Example], folder: str, losses: Sender[float]) -> None:
        """Train on examples and write the model.

        Args:
            examples: examples, the same on every rank.
            folder: where the model is written.
            losses: the loss of every step is put here, by rank 0.
        """
        with self.span("supervised"):
            trainer, steps = await self.compute(self._begin, examples)
            while (loss := await self.compute(next, steps, None)) is not None:
                if self.rank == 0:
                    await losses.put(loss)
            await self.compute(trainer.save_pretrained, Path(folder))

    def _begin(self, examples: list[Example]) -> tuple[Any, Iterator[float]]:
        """The trainer, and its steps, which are taken one by one."""
        from rlinf_async.backends.language_training.supervised import supervised_steps

        part = language_trainers.load(self._backend_name)
        trainer: Any = part.make(self._config, self.world_size, self.rank)
        return trainer, supervised_steps(trainer, examples, self._phase)


DEFAULT_MICRO_BATCH_TOKENS = 16_384


class LanguageBatches(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of one iteration; ``docs/batching.md`` explains the terms."""

    samples: int
    """samples of one iteration, over all ranks"""
    group_size: int = 1
    """samples of one prompt, which stay on one rank"""
    optimizer_steps: int = 1
    """global batches of one epoch"""
    epochs: int = 1
    """passes over the samples of an iteration"""
    micro_batch_size: int | None = None
    """samples of one forward and backward pass"""
    max_tokens_per_micro_batch: int | None = None
    """tokens of one forward and backward pass, instead; 16384 where neither is given"""
    balance_window: int | None = None
    """samples over which token-limited micro-batches are balanced: the global batch where left out,
    which must then be complete before training begins"""

    def __post_init__(self) -> None:
        check_bounds(self, "epochs", least=1)

    def of_rank(self, world_size: int) -> BatchSizes:
        """Return the sizes of one rank; raises `BatchSizeError` where they do not divide."""
        tokens = self.max_tokens_per_micro_batch
        if tokens is None and self.micro_batch_size is None:
            tokens = DEFAULT_MICRO_BATCH_TOKENS
        return BatchSizes(
            total_batch_size=rank_share(self.samples, world_size, group_size=self.group_size),
            num_global_batches=self.optimizer_steps,
            micro_batch_size=self.micro_batch_size,
            max_tokens_per_micro_batch=tokens,
            balance_window=self.balance_window,
        )


class LanguageTrainingWorker(TrainingWorker[LanguageTrainer]):
    """One rank of an actor or critic group.

    Args:
        trainer: configuration of the trainer backend, as its own Struct.
        batches: sizes of an iteration, over all ranks.
        backend: registered name of the backend; the class's own when left out.
        resume: folder of the checkpoint to go on from.
        max_staleness: versions that a token's weights may be behind those that are trained; None:
            any number.
    """

    parts = language_trainers
    backend = DEFAULT_LANGUAGE_TRAINER

    def __init__(
        self,
        trainer: Any,
        batches: LanguageBatches,
        *,
        backend: str | None = None,
        resume: str | None = None,
        max_staleness: int | None = None,
    ) -> None:
        super().__init__(trainer, backend=backend, resume=resume)
        self._iterations = 0
        """iterations that were begun, on all launched ranks"""
        self._max_staleness = max_staleness
        self._batches = batches
        self._sizes = batches.of_rank(1)  # until the trainer knows its data ranks
        self._offloaded = False

    @classmethod
    def resumes_exactly(cls, arguments: Mapping[str, Any]) -> bool:
        return True

    async def setup(self) -> None:
        """Build the model; then it is known which ranks train on the same samples."""
        await super().setup()
        self.take_share(self._trainer.data_rank.size)

    # -- training -----------------------------------------------------------------------------

    async def run_training(self, input_channel: Receiver[SampleGroup]) -> LanguageTrainReport:
        """Collect this rank's whole share of one iteration, then train on it.

        The model is onloaded only after the data has arrived, on ranks that read none for others of
        the same model too; an idle rank takes none. Raises:

            TrainingDiverged: the loss was not finite, or no step's gradient was.
            RuntimeError: a token is older than ``max_staleness``.
            BatchingError: groups do not make up the share.
            RankFailed: one of these, or an error of the channel, on a rank that reads for others;
                on all ranks.
        """

        async def train(iteration: Iteration) -> LanguageTrainReport:
            collected = await self._collected(iteration, input_channel)
            await self.onload()
            return await iteration.train(collected)

        return await self.trained(train)

    async def run_training_pipeline(
        self, input_channel: Receiver[SampleGroup]
    ) -> LanguageTrainReport:
        """Train on one iteration while it arrives: micro-batch after micro-batch.

        The compute thread waits for each next one, so nothing else is computed here meanwhile: ask
        an inference worker for log-probs. Raises what `run_training` does.
        """

        async def train(iteration: Iteration) -> LanguageTrainReport:
            await self.onload()
            return await iteration.train_arriving(input_channel)

        return await self.trained(train)

    async def _collected(
        self, iteration: Iteration, groups: Receiver[SampleGroup]
    ) -> list[SampleGroup]:
        """Return this rank's share; on a rank that reads nothing, wait for the one that does: until
        then others use the device, where the model is offloaded.

        If it cannot be read, the others are not left waiting: `Iteration.cannot_train`.
        """
        data = self._trainer.data_rank
        waited_for = self._offloaded and self.active_world_size != data.size
        store = GroupStore("read") if waited_for else None
        key = f"{self._iterations}/{data.rank}"
        if not data.is_io:
            if store is not None:
                await self._until_set(store, key)
            return []
        try:
            return await iteration.collect(groups)
        except Exception as error:
            failed = error
        finally:
            if store is not None:
                await self.compute(store.set, key, b"all, or failed")
        await iteration.cannot_train(failed)

    async def _until_set(self, store: GroupStore, key: str) -> None:
        seconds = 0.001
        while await self.compute(store.get, key) is None:
            await asyncio.sleep(seconds)
            seconds = min(seconds * 1.5, LONGEST_POLL)

    def _iteration(self) -> Iteration:
        return Iteration(
            self,
            self._trainer,
            self._sizes,
            epochs=self._batches.epochs,
            max_staleness=self._max_staleness,
        )

    async def skip_training(self, input_channel: Receiver[SampleGroup]) -> LanguageTrainReport:
        """Take this rank's share of one iteration and count the version up, without training.

        For an actor whose critic is still warming up.
        """

        async def skip(iteration: Iteration) -> LanguageTrainReport:
            return await iteration.skip(await iteration.collect(input_channel))

        return await self.trained(skip)

    async def trained(
        self, train: Callable[[Iteration], Awaitable[LanguageTrainReport]]
    ) -> LanguageTrainReport:
        """Train one iteration, or count it on an idle rank; then apply the strategies due."""
        async with self.training():
            self._iterations += 1
            iteration = self._iteration()
            if self.active:
                report = await train(iteration)
            else:
                await self.compute(self.rescalable().skip_iteration)
                report = iteration.report([], seconds=0.0)
            await self.scheduler_scale_sync()
            report.ranks = self._trainer.data_rank.size
            return report

    async def compute_advantages_and_returns(self, batch: SampleGroup) -> SampleGroup:
        """Return the same samples with advantages and returns; existing ones are kept."""
        return await self.compute(with_advantages, self._trainer, batch)

    # -- inference ----------------------------------------------------------------------------

    async def pass_through(
        self,
        input_channel: Receiver[Sample],
        output_channel: Sender[Sample],
        answer: Callable[[list[Sample]], list[Sample]],
    ) -> int:
        """Send this rank's share of one iteration on, with answers; return its number of samples.

        One rank alone takes the samples that are ready. The ranks of a sharded model compute
        together: each takes equally many, and waits for the others; of the ranks with the same
        samples one takes them. Samples are leased until they are sent on. Raises `IncompleteShare`
        when the channel ends before.
        """
        await self.onload()
        left = self._sizes.total_batch_size
        size = self._sizes.micro_batch_size or self._sizes.global_batch_size
        least = 1 if self.active_world_size == 1 else None
        if not self._trainer.data_rank.is_io:
            for _ in range(0, left, size):
                await self.compute(answer, [])
            return left
        try:
            while left > 0:
                async with input_channel.lease(weight=min(size, left), at_least=least) as batch:
                    with self.span("inference", samples=len(batch)):
                        left -= len(batch)
                        done = await self.compute(answer, list(batch))
                    for sample in done:
                        await output_channel.put(sample)
        except ChannelError as error:
            failed = (
                error
                if not isinstance(error, EndOfChannel)
                else IncompleteShare(
                    f"the channel {input_channel.channel_name!r} ended {left} samples before the "
                    f"{self._sizes.total_batch_size} of this iteration on {self.name}"
                )
            )
            if left > 0 and isinstance(self._trainer, ReadsForOthers):
                await self.compute(self._trainer.cannot_infer, failed)
            raise failed from error
        return self._sizes.total_batch_size

    # -- the device's memory ------------------------------------------------------------------

    async def offload(self) -> None:
        """Free the device's memory."""
        if not self._offloaded:
            with self.span("offload"):
                await self.compute(self._trainer.offload)
            self._offloaded = True

    async def onload(self) -> None:
        """Move weights and optimizer back to the device, where they were offloaded."""
        if self._offloaded:
            with self.span("onload"):
                await self.compute(self._trainer.onload)
            self._offloaded = False

    # -- the number of ranks that train -------------------------------------------------------

    async def scheduler_pre_process(self) -> None:
        """Wait for who trains the iteration that begins. On all launched ranks."""
        await self.scheduler_scale_sync()

    async def scheduler_offload_sync(self) -> None:
        """Free the devices for others."""
        if self.active:
            await self.offload()

    def check_share(self, dp: int) -> None:
        """Raise `ValueError` unless ``dp`` ranks can share a global batch in whole groups."""
        shares = self._batches
        check_batch(shares.samples // shares.optimizer_steps, dp, group_size=shares.group_size)
        shares.of_rank(dp)

    def take_share(self, dp: int) -> None:
        """Use the batch sizes of one of ``dp`` ranks."""
        self._sizes = self._batches.of_rank(dp)

    async def make_ready(self) -> None:
        """Move the model back to the device."""
        await self.onload()


class ShareOfLogProbs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probs of every ``ranks``-th example from number ``rank`` on."""

    rank: int
    ranks: int
    log_probs: list[Floats]
    """``[R]`` each; 0 of tokens that are not learnt"""


class LanguageActor(LanguageTrainingWorker):
    """One rank of the actor group, over any `LanguageTrainer`; see `LanguageTrainingWorker`.

    ::

        SampleGroup --by rank--> [ advantages -> normalised -> micro-batches -> steps ] --> report
                                                         |
                                                    version + 1 --WeightUpdate, `Latest`--> rollout
        Sample --> [ previous, reference log-probs ] --> Sample

    What it waits for: see `LanguageTrainingWorker`; publishing waits for nothing.

    `FSDPActor` and `MegatronActor` are this one with a backend of their own.
    """

    async def run_inference(
        self,
        input_channel: Receiver[Sample],
        output_channel: Sender[Sample],
        compute_ref_logprobs: bool = False,
    ) -> int:
        """Add previous (and reference) log-probs to this rank's share of one iteration.

        Each is sent on at once. Returns the number of samples, 0 on an idle rank; see
        `pass_through`.
        """
        if not self.active:
            return 0
        answer = partial(with_log_probs, self._trainer, reference=compute_ref_logprobs)
        return await self.pass_through(input_channel, output_channel, answer)

    async def sync_model_to_rollout(self, weights: LatestSender[WeightUpdate]) -> int:
        """Publish the present version, from rank 0; returns it. Every rank takes part."""
        with self.span("publish", version=self._trainer.version):
            update = await self.compute(self._trainer.publish, shared_bytes)
            if self.rank == 0:
                await weights.publish(update)
        return update.version

    async def save_pretrained(self, path: str) -> str:
        """Write the model as Hugging Face does, from rank 0: config and weights, no tokenizer."""
        await self.onload()
        with self.span("export"):
            await self.compute(self._trainer.save_pretrained, Path(path))
        return path

    async def get_model_state_and_offload(self) -> WeightUpdate:
        """Return the weights (in buckets, on rank 0) and free all of the device's memory.

        Optimizer and gradients go first, which makes room for the copy of the weights.
        """
        await self.compute(self._trainer.offload, keep_weights=True)
        update = await self.compute(self._trainer.publish, shared_bytes)
        await self.offload()
        return update

    async def log_probs(self, sequences: list[tuple[Tokens, Tokens]]) -> list[Floats]:
        """Return log-probs at temperature 1 of ``(prompt [P], response [R])``: ``[R]`` each.

        Every rank of a sharded model takes part, with the same sequences or other ones.
        """
        await self.onload()
        samples = [bare_sample(*one, index=at) for at, one in enumerate(sequences)]
        return await self.compute(self._trainer.log_probs, samples)

    async def log_probs_of_share(self, examples: list[Example]) -> ShareOfLogProbs:
        """Return log-probs at temperature 1 of this rank's share: every so many-th example.

        Every rank takes part, with the same examples.
        """
        await self.onload()
        data = self._trainer.data_rank
        share = examples[data.rank :: data.size]
        with self.span("log-probs", samples=len(share)):
            samples = [one.sample(at) for at, one in enumerate(share)] if data.is_io else []
            found = await self.compute(self._trainer.log_probs, samples)
        return ShareOfLogProbs(rank=data.rank, ranks=data.size, log_probs=found)

    async def check_weight_update_equal(
        self,
        sequences: list[tuple[Tokens, Tokens]],
        log_probs: list[Floats],
        tolerance: float = 1e-3,
        in_the_mean: bool = False,
    ) -> float:
        """Compare an engine's log-probs with this model's; return the largest difference.

        Args:
            sequences: ``(prompt [P], response [R])``.
            log_probs: the engine's, under the present version, at temperature 1.
            tolerance: the largest difference that is allowed.
            in_the_mean: over the tokens of all sequences, not of each one: for less than float32,
                whose rounding moves single tokens far.

        Raises:
            WeightsDisagree: a token, or the mean, differs by more, or is NaN on either side.
        """
        own = await self.log_probs(sequences)
        differences = []
        for at, (ours, theirs) in enumerate(zip(own, log_probs, strict=True)):
            if len(ours) != len(theirs):
                raise WeightsDisagree(
                    f"sequence {at} has {len(ours)} response tokens, but the engine returned "
                    f"log-probs of {len(theirs)}"
                )
            differences.append(np.abs(ours.astype(np.float64) - theirs))
        every = np.concatenate([np.empty(0), *differences])
        worst, mean = every.max(initial=0.0), every.sum() / max(len(every), 1)
        if not (mean if in_the_mean else worst) <= tolerance:
            at = int(
                np.argmax([np.nan_to_num(one, nan=np.inf).max(initial=0.0) for one in differences])
            )
            token = int(np.argmax(np.nan_to_num(differences[at], nan=np.inf)))
            limit = f"allowed {tolerance:.0e}{' in the mean' if in_the_mean else ''}"
            raise WeightsDisagree(
                f"version {self._trainer.version}: the engine's log-prob of token {token} of "
                f"sequence {at} is {log_probs[at][token]:.6f}, the actor's is "
                f"{own[at][token]:.6f} (difference {differences[at][token]:.2e}, the mean of all "
                f"tokens is {mean:.2e}; {limit}). The engine does not serve the weights that were "
                "published, or computes in another precision (then raise "
                "training.check_weights_tolerance)"
            )
        return float(worst)


class FSDPActor(LanguageActor):
    """One rank of the actor group; its ``trainer`` is a `LanguageTrainerConfig`."""

    backend = "fsdp"
