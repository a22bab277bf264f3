"""`MegatronTrainer`: the `LanguageTrainer` of an actor, over Megatron; and what a critic shares.

::

    one rank of a model reads samples --Feed--> all of its ranks --Schedule--> losses, log-probs
                                                                                  | (last stage)
                               every rank <--totals over data ranks, broadcast----+

Published weights of a model that tensor ranks and stages share: each rank writes its slices.

The memory in which they are published counts as one more rank of a plan, which holds nothing yet.
So data ranks, and others that hold the same, share what there is to write.

`MegatronCriticTrainer`: the `LanguageTrainer` of a critic, over Megatron.

Its targets are the ``returns`` that `compute_advantages` computes from rewards and from the values
of this critic when the samples were collected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.algorithms.language.advantages import AdvantageMoments, advantage_moments, whitened
from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.checkpoint.together import fail_together
from rlinf_async.backends.checkpoint.writing import CheckpointWriter
from rlinf_async.backends.language import OPTIMIZER, PARTS, WEIGHTS, MicroBatch
from rlinf_async.backends.language_training.model import write_model_folder
from rlinf_async.backends.language_training.objective import (
    SUPERVISED,
    Forward,
    Part,
    PolicyObjective,
    TokenStatistics,
    Totals,
    ValueObjective,
    by_tokens,
    check_engine,
    check_finite,
    pack_samples,
    whole_response,
)
from rlinf_async.backends.language_training.trainer import IterationTrainer
from rlinf_async.backends.language_training.weights import (
    REFERENCE,
    KeptWeights,
    PlacedPart,
    publish_in_place,
)
from rlinf_async.backends.megatron import checkpoint
from rlinf_async.backends.megatron.config import MegatronTrainerConfig, layout_of
from rlinf_async.backends.megatron.manager import MegatronModelManager
from rlinf_async.backends.megatron.rescale import check_strategy, rescale
from rlinf_async.backends.megatron.schedule import Work
from rlinf_async.backends.reshard.buckets import window
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample
from rlinf_async.messages.weights import Allocate, WeightUpdate
from rlinf_async.parallel import DataRank, Strategy, layout, plan
from rlinf_async.parallel.decoders import huggingface
from rlinf_async.weights import pack


def publish_slices(
    manager: MegatronModelManager,
    dtype: torch.dtype,
    version: int,
    bucket_bytes: int,
    *,
    allocate: Allocate | None,
    previous: WeightUpdate | None,
) -> WeightUpdate | None:
    """Return what `publish_in_place` does, by the names of a checkpoint; None also for one rank.
    Collective over the active ranks, whose weights are on their devices."""
    ranks = manager.world_size
    if ranks == 1:
        return None
    architecture = manager.architecture
    published = layout(huggingface(architecture.decoder), Strategy(), ranks=(ranks,))
    moves = plan(layout_of(architecture, manager.strategy), published)
    live = manager.live_weights()
    tensors = {
        one.name: torch.empty(one.shape, dtype=dtype, device="meta")
        for one in published.of_rank(ranks)
    }
    parts: dict[str, list[PlacedPart]] = {name: [] for name in tensors}
    for run in moves.of_rank(manager.rank).sends:
        name, size, stride, offset = run.target
        source = window(live[run.source.buffer], run.source)
        parts[name].append(PlacedPart(source, size, stride, offset))
    return publish_in_place(
        manager, tensors, parts, version, bucket_bytes, allocate=allocate, previous=previous
    )


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Accumulated(NamedTuple):
    """What the gradients of a global batch are of, on every rank."""

    metrics: dict[str, float]
    units: float
    """what the gradients are to be divided by"""


class MegatronTrainerBase(IterationTrainer[MegatronTrainerConfig]):
    """What a policy and a critic have in common. torch.distributed is up on several ranks."""

    def __init__(self, config: MegatronTrainerConfig, world_size: int, rank: int) -> None:
        super().__init__(config)
        self.objective = (ValueObjective if self.critic else PolicyObjective)(config)
        self.manager = MegatronModelManager(
            config.megatron, world_size, rank, config.seed, values=self.critic
        )
        self._writer = CheckpointWriter()
        self.kept_weights = KeptWeights(self.manager)

    @property
    def data_rank(self) -> DataRank:
        """The ranks of one model have the same."""
        return self.manager.data_rank

    # ---- advantages

    def normalize_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return this rank's part of a global batch, normalised over all of it. Collective among
        the ranks that read."""
        every = self.manager.readers.exchange(advantage_moments(samples))
        moments = AdvantageMoments(*(math.fsum(column) for column in zip(*every, strict=True)))
        return whitened(samples, moments)

    def agree(self, count: int, /) -> int:
        """Return the largest count of the ranks that read. Collective among those."""
        return max(int(one) for (one,) in self.manager.readers.exchange([count]))

    def cannot_train(self, error: Exception, /) -> NoReturn:
        """Raise `RankFailed` on all ranks, in place of the global batch that they train next."""
        self.manager.readers.begin()
        self.manager.feed.fail(error)

    def cannot_infer(self, error: Exception, /) -> NoReturn:
        """Raise `RankFailed` on the ranks of this model, in place of the next log-probs or
        values."""
        self.manager.feed.fail_model(error)

    # ---- training

    def training_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Make one optimizer step. Collective. Raises `OffloadedError` while offloaded."""
        metrics = self._step(micro_batches, None, self.compared_version)
        self._stepped = True
        return metrics

    def forward_backward(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Compute the gradients of one global batch, undivided, in place of those that are there.
        Collective.

        They are reduced over ranks, in place: a second batch cannot be added to them.

        Raises `OffloadedError` while offloaded.
        """
        self.manager.check_onloaded("forward_backward()")
        self.manager.zero_grad()
        return self._accumulate(micro_batches, None, self.compared_version).metrics

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return what Megatron's schedule calls for each micro-batch: see `Schedule.step`."""
        return self.manager.training.step

    # ---- the strategy

    @property
    def strategy(self) -> Strategy:
        """The strategy that is in force."""
        return self.manager.strategy

    def check_strategy(self, strategy: Strategy) -> None:
        """Raise `StrategyError` for what does not divide the model or was not launched."""
        check_strategy(strategy, self.manager.architecture, self.manager.launched)

    def rescale(
        self, strategy: Strategy, *, timeout: float, bucket_bytes: int, objection: str = ""
    ) -> RescaleReport:
        """Train under another strategy from now on; see `megatron.rescale`.

        Kept weights move too. Collective over all launched ranks.
        """
        report = rescale(
            self.manager,
            strategy,
            timeout=timeout,
            bucket_bytes=bucket_bytes,
            extra=self._told(),
            objection=objection,
            settle=self._writer.settle,
        )
        self._take(report.extras[0])
        return report

    def _step(
        self,
        micro_batches: Iterable[MicroBatch],
        loss: LanguageLossConfig | None,
        version: int | None = None,
    ) -> Mapping[str, float]:
        manager = self.manager
        manager.check_onloaded("an optimizer step")
        manager.zero_grad()
        found = self._accumulate(micro_batches, loss, version)
        if found.units == 0:
            manager.zero_grad()
            nothing = {"empty": 1.0, "skipped": 0.0, "grad_norm": 0.0, "lr": manager.lr}
            return found.metrics | nothing
        before = manager.skipped_steps
        grad_norm, lr = manager.optimizer_step(1.0 / found.units)
        skipped = float(manager.skipped_steps - before)
        return found.metrics | {
            "empty": 0.0,
            "skipped": skipped,
            "grad_norm": grad_norm,
            "lr": lr,
        }

    def _accumulate(
        self,
        micro_batches: Iterable[MicroBatch],
        loss: LanguageLossConfig | None,
        version: int | None,
    ) -> Accumulated:
        """Raises `TrainingDiverged` for a loss that is not finite, `EngineDisagrees` where the
        engine's log-probs are others, `NoSamples` where there are no micro-batches, `RankFailed`:
        there are no gradients then."""
        try:
            return self._accumulated(micro_batches, loss, version)
        except Exception:
            self.manager.zero_grad()
            raise

    def _accumulated(
        self,
        micro_batches: Iterable[MicroBatch],
        loss: LanguageLossConfig | None,
        version: int | None,
    ) -> Accumulated:
        manager = self.manager
        prepare = partial(self._work, loss=loss, version=version)
        counted = manager.strategy.pp > 1
        totals = Totals()
        for part in manager.training.train(
            manager.feed.share(micro_batches, prepare, counted=counted)
        ):
            totals.add(part)
        manager.feed.finish()
        if manager.grid.is_last_stage:
            row = totals.row(manager.device)
            manager.sum_over_data(row)
            totals.take(row)
        own = Accumulated(totals.metrics(), totals.units)
        found: Accumulated = manager.from_last_stage(own, Accumulated)
        check_finite(found.metrics, manager.steps)
        check_engine(found.metrics, self.config.engine_tolerance, self._version)
        return found

    def _work(
        self, micro_batch: MicroBatch, loss: LanguageLossConfig | None, version: int | None
    ) -> Work:
        self.manager.pending = True
        forward = self.objective.prepare(
            micro_batch.samples, self.manager.device, loss=loss, always=True, version=version
        )
        assert isinstance(forward, Forward)

        def answer(found: Any) -> tuple[Tensor, Part]:
            part = forward.answer(found)
            return part.loss, part._replace(loss=part.loss.detach().clone())

        return Work(forward.packed, answer, micro_batch.is_last, micro_batch.of)

    # ---- inference

    def _answers(
        self, samples: Sequence[TrainingSample], read: Callable[[Any], Tensor]
    ) -> list[Floats]:
        """Return ``[R]`` of each response of the rank that reads, on every rank of its model;
        ``read`` takes them from what is found in a micro-batch. Collective."""
        with self.manager.awake({WEIGHTS}):
            # Here, not as the first forward pass needs them: a data rank may have no samples.
            self.manager.gather_parameters()
            return self._computed(samples, read)

    def _computed(
        self, samples: Sequence[TrainingSample], read: Callable[[Any], Tensor]
    ) -> list[Floats]:
        manager = self.manager
        samples = manager.feed.broadcast(list(samples), list[TrainingSample])
        if not samples:
            return []
        limit = self.config.max_tokens_per_forward
        parts = by_tokens([sample.tokens for sample in samples], limit)

        def answer(found: Any) -> tuple[Tensor, Any]:
            numbers = read(found)
            return numbers.sum(), numbers.float().cpu().numpy()

        def work() -> Iterator[Work]:
            for number, part in enumerate(parts, 1):
                chosen = [samples[at] for at in part]
                masks = [whole_response(one) for one in chosen]
                packed = pack_samples(chosen, masks, manager.device)
                yield Work(packed, answer, number == len(parts), len(parts))

        answers = manager.from_last_stage(manager.inference.infer(work(), len(parts)), list[Floats])
        found: dict[int, Floats] = {}
        for part, numbers in zip(parts, answers, strict=True):
            ends = np.cumsum([len(samples[at].response_ids) for at in part])[:-1]
            found |= zip(part, np.split(numbers, ends), strict=True)
        return [found[at] for at in range(len(samples))]

    # ---- where weights and moments are

    def sleep(self, parts: Collection[str] = PARTS) -> None:
        """Move these parts to the CPU; gradients are dropped with the optimizer's."""
        if OPTIMIZER in parts:
            self.manager.offload_optimizer()
        if WEIGHTS in parts:
            self.manager.offload_weights()

    def wake_up(self, parts: Collection[str] = PARTS) -> None:
        """Take these parts back to the device."""
        if WEIGHTS in parts:
            self.manager.load_weights()
        if OPTIMIZER in parts:
            self.manager.load_optimizer()

    @property
    def asleep(self) -> frozenset[str]:
        """The parts that are on the CPU."""
        sleeping = {
            WEIGHTS: self.manager.weights_offloaded,
            OPTIMIZER: self.manager.optimizer_offloaded,
        }
        return frozenset(part for part, one in sleeping.items() if one)

    # ---- checkpoints

    def save_checkpoint(self, path: Path, extra: Mapping[str, object] | None = None) -> None:
        """Write a checkpoint folder, atomically, also while offloaded; ``extra`` is this rank's
        own. Collective."""
        self.begin_checkpoint(path, extra)
        checkpoint.finish(self.manager, self._writer, path)

    def begin_checkpoint(
        self, path: Path, extra: Mapping[str, object] | None = None
    ) -> Future[Path]:
        """Start writing what `save_checkpoint` writes, and return. Collective."""
        content = self._content(extra)
        return checkpoint.begin(self.manager, self._writer, path, content)

    def load_checkpoint(self, path: Path) -> list[dict[str, object]]:
        """Continue where a checkpoint was written, under any strategy of this backend or the FSDP
        backend's; return its ranks' extras. Collective."""
        own = checkpoint.load(self.manager, self._writer, path)
        self._take_content(own[0].extra)
        return [one.extra["extra"] for one in own]


class MegatronTrainer(MegatronTrainerBase):
    """A `LanguageTrainer`: policy-gradient losses over packed samples, for one rank of an actor."""

    def __init__(self, config: MegatronTrainerConfig, world_size: int, rank: int) -> None:
        super().__init__(config, world_size, rank)
        self._published: WeightUpdate | None = None
        if config.reference:
            self.kept_weights.backup(REFERENCE)

    def supervised_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Make one optimizer step on the cross-entropy of the responses. Collective."""
        metrics = self._step(micro_batches, SUPERVISED)
        self._stepped = True
        return metrics

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Return log-probs ``[R]`` of each response of the rank that reads, on every rank of its
        model, also while offloaded. Collective.

        Raises `ValueError` for the reference where none is kept.
        """
        if not reference:
            return self._answers(samples, _log_probs)
        if REFERENCE not in self.kept_weights.tags:
            raise ValueError(
                "reference log-probs were asked for, but no reference weights are kept: set "
                "reference = true in the trainer's configuration"
            )
        with self.manager.awake({WEIGHTS}), self.kept_weights.swapped_in():
            return self._answers(samples, _log_probs)

    def values(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Raise `ValueError`: a policy has no values."""
        raise ValueError("a policy has no values: ask a critic (backend 'megatron_critic')")

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Return the weights of the present version, also while offloaded; no buckets but on rank
        0. Collective."""
        if not self.manager.active:
            return pack({}, self._version)
        manager, dtype = self.manager, DTYPES[self.config.publish_precision]
        size, before = self.config.bucket_bytes, self._published
        with manager.awake({WEIGHTS}):
            update = publish_slices(
                manager, dtype, self._version, size, allocate=allocate, previous=before
            )
        if update is None:
            state = manager.whole_weights(dtype)
            update = pack(state, self._version, size, allocate=allocate, previous=before)
        self._published = update
        return update

    def save_pretrained(self, folder: Path) -> None:
        """Write config, weights and tokenizer as Hugging Face does, from rank 0. Collective."""
        if not self.manager.active:
            return
        state = self.manager.whole_weights(torch.float32)
        with fail_together(self.manager, f"writing {folder}"):
            if self.manager.rank == 0:
                model = self.manager.language_model()
                write_model_folder(model, state, self.manager.model_files, folder)

    def load(self, update: WeightUpdate) -> None:
        """Raise `ValueError`: inference workers hold whole models, over FSDP."""
        raise ValueError("published weights are loaded by inference workers (backend 'fsdp')")


def _log_probs(found: TokenStatistics) -> Tensor:
    return found.log_prob


NOT_A_POLICY = "a critic has no {what}: ask the actor (backend 'megatron')"


class MegatronCriticTrainer(MegatronTrainerBase):
    """Half the squared error of values, over packed samples, for one rank of a critic."""

    critic = True

    def values(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Return values ``[R]`` before each response token of the rank that reads, on every rank of
        its model. Collective."""
        return self._answers(samples, _as_they_are)

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Raise `ValueError`."""
        raise ValueError(NOT_A_POLICY.format(what="log-probs"))

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Raise `ValueError`: no engine takes a critic."""
        raise ValueError(NOT_A_POLICY.format(what="weights to publish"))

    def load(self, update: WeightUpdate) -> None:
        """Raise `ValueError`."""
        raise ValueError(NOT_A_POLICY.format(what="use for published weights"))

    def save_pretrained(self, folder: Path) -> None:
        """Raise `ValueError`: a value head has no place in a Hugging Face folder."""
        raise ValueError(NOT_A_POLICY.format(what="Hugging Face folder"))


def _as_they_are(found: Tensor) -> Tensor:
    return found
