"""`MegatronTrainer` and `MegatronCriticTrainer`: the `LanguageTrainer` of an actor and of a critic,
over Megatron.

::

    one rank of a model reads samples --Feed--> all of its ranks --Schedule--> losses, log-probs
                                                                                  | (last stage)
                               every rank <--totals over data ranks, broadcast----+
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.checkpoint.writing import CheckpointWriter
from rlinf_async.backends.language import OPTIMIZER, PARTS, WEIGHTS, MicroBatch
from rlinf_async.backends.language_training.objective import (
    Forward,
    MicroBatchSums,
    Totals,
    by_sample,
    by_tokens,
    pack_responses,
)
from rlinf_async.backends.language_training.trainer import (
    Accumulated,
    Critic,
    LanguageModelTrainer,
    LanguagePolicyTrainer,
)
from rlinf_async.backends.language_training.weights import OwnParts, PlacedPart
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


class MegatronLanguageTrainer(LanguageModelTrainer[MegatronTrainerConfig, MegatronModelManager]):
    """The part of a trainer of a policy or a critic that Megatron does."""

    backend = "megatron"

    def __init__(self, config: MegatronTrainerConfig, world_size: int, rank: int) -> None:
        self._writer = CheckpointWriter()
        super().__init__(config, world_size, rank)

    def _build(self, world_size: int, rank: int) -> MegatronModelManager:
        config = self.config
        return MegatronModelManager(
            config.megatron, world_size, rank, config.seed, values=self.critic
        )

    @property
    def language(self) -> nn.Module:
        """The model of transformers, without memory."""
        return self.manager.language_model()

    # ---- the ranks that read samples

    @property
    def data_rank(self) -> DataRank:
        """The ranks of one model have the same."""
        return self.manager.data_rank

    def agree(self, count: int, /) -> int:
        """Return the largest count of the ranks that read. Collective among those."""
        return max(int(one) for (one,) in self.manager.readers.exchange([count]))

    def _summed(self, numbers: Sequence[float]) -> list[float]:
        every = self.manager.readers.exchange(numbers)
        return [math.fsum(column) for column in zip(*every, strict=True)]

    def cannot_train(self, error: Exception, /) -> NoReturn:
        """Raise `RankFailed` on all ranks, in place of the global batch that they train next."""
        self.manager.readers.begin()
        self.manager.feed.fail(error)

    def cannot_infer(self, error: Exception, /) -> NoReturn:
        """Raise `RankFailed` on the ranks of this model, in place of the next log-probs or
        values."""
        self.manager.feed.fail_model(error)

    # ---- training

    def forward_backward(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Compute the gradients of one global batch, undivided, in place of those that are there.
        Collective.

        They are reduced over ranks, in place: a second batch cannot be added to them.

        Raises `OffloadedError` while offloaded.
        """
        doing, version = "forward_backward()", self.compared_version
        return self._gradients(doing, micro_batches, None, version).metrics

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return what Megatron's schedule calls for each micro-batch: see `Schedule.step`."""
        return self.manager.training.step

    def _begin_batch(self, doing: str) -> None:
        self.manager.check_onloaded(doing)
        self.manager.zero_grad()

    def _accumulate(
        self,
        micro_batches: Iterable[MicroBatch],
        loss: LanguageLossConfig | None,
        version: int | None,
    ) -> Accumulated:
        """Raises also `NoSamples` where there are no micro-batches, and `RankFailed`."""
        manager = self.manager
        prepare = partial(self._work, loss=loss, version=version)
        shared = manager.feed.share(micro_batches, prepare, counted=manager.strategy.pp > 1)
        totals = Totals()
        for part in manager.training.train(shared):
            totals.add(part)
        manager.feed.finish()
        if manager.grid.is_last_stage:
            row = totals.row(manager.device)
            manager.sum_over_data(row)
            totals.take(row)
        own = Accumulated(totals.metrics(), totals.units)
        found: Accumulated = manager.from_last_stage(own, Accumulated)
        return found

    def _work(
        self, micro_batch: MicroBatch, loss: LanguageLossConfig | None, version: int | None
    ) -> Work:
        self.manager.pending = True
        forward = self.objective.prepare(
            micro_batch.samples, self.manager.device, loss=loss, always=True, version=version
        )
        assert isinstance(forward, Forward)

        def answer(found: Any) -> tuple[Tensor, MicroBatchSums]:
            part = forward.answer(found)
            return part.loss, part._replace(loss=part.loss.detach().clone())

        return Work(forward.packed, answer, micro_batch.is_last, micro_batch.of)

    @property
    def _lr(self) -> float:
        return self.manager.lr

    def _optimizer_step(self, units: float) -> float:
        return self.manager.optimizer_step(1.0 / units)[0]

    # ---- forward passes without gradients, also while offloaded

    def _answers(
        self, samples: Sequence[TrainingSample], read: Callable[[Any], Tensor]
    ) -> list[Floats]:
        """Return the answers of the rank that reads, on every rank of its model."""
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
        parts = by_tokens([one.tokens for one in samples], self.config.max_tokens_per_forward)

        def answer(found: Any) -> tuple[Tensor, Any]:
            numbers = read(found)
            return numbers.sum(), numbers.float().cpu().numpy()

        def work() -> Iterator[Work]:
            for number, part in enumerate(parts, 1):
                packed = pack_responses([samples[at] for at in part], manager.device)
                yield Work(packed, answer, number == len(parts), len(parts))

        answers = manager.from_last_stage(manager.inference.infer(work(), len(parts)), list[Floats])
        return by_sample(samples, parts, answers)

    # ---- the strategy

    def check_strategy(self, strategy: Strategy) -> None:
        """Raise `StrategyError` for what does not divide the model or was not launched."""
        check_strategy(strategy, self.manager.architecture, self.manager.launched)

    def _rescale(self, strategy: Strategy, **options: Any) -> RescaleReport:
        return rescale(self.manager, strategy, settle=self._writer.settle, **options)

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

    # ---- weights that leave and come back

    def _own_parts(self, dtype: torch.dtype) -> OwnParts | None:
        return published_slices(self.manager, dtype)

    def _whole_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return self.manager.whole_weights(dtype)

    def save_checkpoint(self, path: Path, extra: Mapping[str, object] | None = None) -> None:
        """Write a checkpoint folder, atomically, also while offloaded; ``extra`` is this rank's
        own. Collective."""
        self.begin_checkpoint(path, extra)
        checkpoint.finish(self.manager, self._writer, path)

    def begin_checkpoint(
        self, path: Path, extra: Mapping[str, object] | None = None
    ) -> Future[Path]:
        """Start writing what `save_checkpoint` writes, and return. Collective."""
        return checkpoint.begin(self.manager, self._writer, path, self._content(extra))

    def _load(self, path: Path) -> list[dict[str, Any]]:
        return [one.extra for one in checkpoint.load(self.manager, self._writer, path)]


class MegatronTrainer(
    MegatronLanguageTrainer, LanguagePolicyTrainer[MegatronTrainerConfig, MegatronModelManager]
):
    """A `LanguageTrainer` of an actor."""

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Return log-probs ``[R]`` of each response, also while offloaded."""
        with self.manager.awake({WEIGHTS}):
            return super().log_probs(samples, reference=reference)

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Return the weights of the present version, also while offloaded; no buckets but on rank
        0. Collective."""
        with self.manager.awake({WEIGHTS}):
            return super().publish(allocate)

    def load(self, update: WeightUpdate) -> None:
        """Raise `ValueError`: inference workers hold whole models, over FSDP."""
        raise ValueError("published weights are loaded by inference workers (backend 'fsdp')")


class MegatronCriticTrainer(
    MegatronLanguageTrainer, Critic[MegatronTrainerConfig, MegatronModelManager]
):
    """A `LanguageTrainer` of a critic."""


def published_slices(manager: MegatronModelManager, dtype: torch.dtype) -> OwnParts | None:
    """Return the slices of published weights that this rank writes, by the names of a checkpoint;
    None for one rank. Collective over the active ranks, whose weights are on their devices.

    The memory in which they are published counts as one more rank of a plan, which holds nothing
    yet. So data ranks, and others that hold the same, share what there is to write.
    """
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
    return OwnParts(tensors, parts)
