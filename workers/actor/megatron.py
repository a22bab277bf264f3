"""`MegatronActor`: a `LanguageActor` that Megatron trains, with the steps of its schedule by name.

::

    run_training, run_training_pipeline      iterations, as those of every `LanguageActor`
      training_step                          zero gradients, forward and backward, optimizer
        run_forward_backward                 of samples that are there
        run_forward_backward_iterator        of samples that arrive: Megatron's schedule pulls them
          get_forward_step_func              what the schedule calls for each micro-batch

Tensor ranks and pipeline stages with the same data rank take part in each of them; the first of
them reads the samples and hands them on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from rlinf_async.backends.language import MicroBatch, StagedTrainer
from rlinf_async.channels import Receiver
from rlinf_async.channels.batching import BatchResizingIterator, BatchSizes
from rlinf_async.channels.batching.iterator import balance, fewest_micro_batches
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import SampleGroup, TrainingSample
from rlinf_async.workers.actor.iteration import Iteration, Step
from rlinf_async.workers.actor.language import LanguageActor

if TYPE_CHECKING:
    Batch: TypeAlias = SampleGroup | BatchResizingIterator[SampleGroup]
    Arriving: TypeAlias = Receiver[SampleGroup] | BatchResizingIterator[SampleGroup]
else:  # what a call from outside can carry: an iterator stays in its process
    Batch, Arriving = SampleGroup, Receiver[SampleGroup]

_forward_steps: dict[str, Callable[..., Any]] = {}
"""what `ForwardStepFunc` calls, by the name of the worker in this process"""


class ForwardStepFunc(msgspec.Struct, frozen=True):
    """A worker's function for one micro-batch. It can be sent anywhere, and called in the worker's
    process, where its weights are."""

    worker: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Compute a micro-batch; raises `RuntimeError` in another process than the worker's."""
        if self.worker not in _forward_steps:
            raise RuntimeError(
                f"the forward step of {self.worker} computes in its process alone: call "
                "run_forward_backward, or this in a method of a class of your own"
            )
        return _forward_steps[self.worker](*args, **options)


class ForwardBackward(msgspec.Struct, kw_only=True):
    """Result of `MegatronActor.run_forward_backward`, equal on all ranks of one model."""

    log_probs: list[Floats] = []
    """``[R]`` of each sample, in the order of the samples, where only the forward pass ran"""
    metrics: dict[str, float] = {}
    """metrics of the global batch, on ranks that computed gradients"""


class MegatronActor(LanguageActor):
    """One rank of the actor group; its ``trainer`` is a `MegatronTrainerConfig`."""

    backend = "megatron"

    @property
    def _staged(self) -> StagedTrainer:
        return cast(StagedTrainer, self._trainer)

    async def get_forward_step_func(self) -> ForwardStepFunc:
        """Return what Megatron's schedule calls with the work that is to come and this stage: it
        computes one micro-batch, on the last stage also log-probs and loss."""
        _forward_steps[self.name] = self._staged.get_forward_step_func()
        return ForwardStepFunc(worker=self.name)

    async def run_forward_backward(
        self, batch: SampleGroup, forward_only: bool = True
    ) -> ForwardBackward:
        """Compute log-probs of samples, or the gradients of their loss. On all ranks.

        Args:
            batch: this data rank's samples, of any number; with advantages for gradients. Those
                that are given to ranks which do not read are ignored.
            forward_only: compute log-probs. Otherwise gradients, undivided, in place of those that
                are there; the next `training_step` begins without them.

        Raises `ValueError` on all ranks if gradients are asked for and a data rank has no samples.
        """
        await self.onload()
        if forward_only:
            samples = batch.samples if self._trainer.data_rank.is_io else []
            with self.span("inference", samples=len(samples)):
                return ForwardBackward(
                    log_probs=await self.compute(self._trainer.log_probs, samples)
                )
        metrics = await self.compute(self._given, batch.samples, self._staged.forward_backward)
        return ForwardBackward(metrics=dict(metrics))

    async def run_forward_backward_iterator(
        self, batch_iterator: Arriving, forward_only: bool = False
    ) -> dict[str, float]:
        """Compute the gradients of one global batch while it arrives. On all ranks.

        Args:
            batch_iterator: a channel's end; or, within the worker, a batch-resizing iterator, whose
                handlers then compute the advantages, and normalise.
            forward_only: has to be False.

        The schedule pulls micro-batches through the blocking view of a batch-resizing iterator: it
        begins with the first one that is complete. Returns the metrics.

        Raises `ValueError` for ``forward_only``: log-probs of samples that arrive are what
        `run_inference` streams.
        """
        if forward_only:
            raise ValueError(
                "run_forward_backward_iterator trains on what arrives; for log-probs alone call "
                "run_inference, or run_forward_backward with a batch"
            )
        return await self._arriving(batch_iterator, self._staged.forward_backward)

    async def training_step(
        self, batch: Batch | None = None, batch_iterator: Arriving | None = None
    ) -> dict[str, float]:
        """Make one optimizer step of a batch, or of the global batch that arrives. On all ranks.

        Args:
            batch: this data rank's samples, with advantages; or, as RLinf has it, an iterator.
            batch_iterator: where they arrive. Of what comes from a channel's end advantages are
                computed, and normalised. Within the worker it may be a batch-resizing iterator, of
                which one global batch is taken: its handlers compute the advantages, and normalise.

        Returns the metrics: ``loss``, ``grad_norm``, ``lr``, ``update_success`` (0 where the norm
        was not finite, or no token counted) and those of the loss. Raises `ValueError` unless
        exactly one is given, and on all ranks if a data rank has no samples.
        """
        if (batch is None) == (batch_iterator is None):
            raise ValueError("give either a batch or a batch_iterator")
        if isinstance(batch, BatchResizingIterator):
            batch, batch_iterator = None, batch
        if batch_iterator is not None:
            return _public_metrics(
                await self._arriving(batch_iterator, self._trainer.training_step)
            )
        assert batch is not None
        await self.onload()
        step = self._trainer.training_step
        return _public_metrics(await self.compute(self._given, batch.samples, step))

    async def get_inference_weight_dst_ranks(
        self, inference_tp: int, inference_pp: int
    ) -> list[int]:
        """Return the inference ranks that get weights: the first whole model's.

        Raises `ValueError` for sizes below 1.
        """
        if inference_tp < 1 or inference_pp < 1:
            raise ValueError(
                f"inference_tp is {inference_tp} and inference_pp {inference_pp}; both must be at "
                "least 1"
            )
        return list(range(inference_tp * inference_pp))

    async def _arriving(self, groups: Arriving, step: Step) -> dict[str, float]:
        await self.onload()
        sizes = self._sizes
        one = msgspec.structs.replace(
            sizes, total_batch_size=sizes.global_batch_size, num_global_batches=1
        )
        iteration = Iteration(
            self, self._trainer, one, epochs=1, max_staleness=self._max_staleness, step=step
        )
        if isinstance(groups, BatchResizingIterator):
            return dict(await iteration.compute_next(groups))
        (metrics,) = await iteration.compute_arriving(groups)
        return dict(metrics)

    def _given(self, samples: Sequence[TrainingSample], step: Step) -> Mapping[str, float]:
        """Give this rank's samples to ``step``, if it reads."""
        reads = self._trainer.data_rank.is_io
        return step(_micro_batches(samples, self._sizes) if reads else ())


def _public_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    success = not metrics["skipped"] and not metrics["empty"]
    return dict(metrics) | {"update_success": float(success)}


def _micro_batches(samples: Sequence[TrainingSample], sizes: BatchSizes) -> Iterable[MicroBatch]:
    parts = list(_parts(samples, sizes))
    for number, part in enumerate(parts, 1):
        yield MicroBatch(part, number == len(parts), len(parts))


def _parts(
    samples: Sequence[TrainingSample], sizes: BatchSizes
) -> Iterator[Sequence[TrainingSample]]:
    """Cut samples as the sizes say: equally many each, or balanced by tokens."""
    size, most = sizes.micro_batch_size, sizes.max_tokens_per_micro_batch
    if size is not None or not samples:
        for start in range(0, len(samples), size or 1):
            yield samples[start : start + (size or 1)]
        return
    assert most is not None  # one of the two limits is there
    lengths = [sample.tokens for sample in samples]
    for part in balance(lengths, fewest_micro_batches(lengths, most)):
        yield [samples[at] for at in part]
