"""`PolicyTrainer`: the `LanguageTrainer` of an actor, over FSDP.

Log-probs and values of any number of samples, without gradients.

Samples are divided into forward passes by tokens. Every rank of a sharded model takes part in
every forward pass, so the ranks agree on their number; one without samples passes a single token.

One optimizer step from micro-batches that are still arriving; see `language_training.totals`.

`CriticTrainer`: the `LanguageTrainer` of a critic, over FSDP.

Its targets are the ``returns`` that `compute_advantages` computes from rewards and from the values
of this critic when the samples were collected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.algorithms.language.advantages import AdvantageMoments, advantage_moments, whitened
from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.building import building
from rlinf_async.backends.fsdp import ranks
from rlinf_async.backends.fsdp.config import FSDPError
from rlinf_async.backends.fsdp.language.config import LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.network import (
    PolicyNetwork,
    ValueNetwork,
    check_same_as_transformers,
)
from rlinf_async.backends.fsdp.language.publishing import (
    hugging_face_state,
    load_hugging_face_state,
    publish_shards,
)
from rlinf_async.backends.fsdp.manager import DTYPES, FSDPModelManager
from rlinf_async.backends.fsdp.rescale import check_strategy, rescale
from rlinf_async.backends.fsdp.state import reshard, unwrapped
from rlinf_async.backends.language import OPTIMIZER, PARTS, WEIGHTS, MicroBatch
from rlinf_async.backends.language_training.model import (
    build_language_model,
    describing_files,
    write_model_folder,
)
from rlinf_async.backends.language_training.objective import (
    SUPERVISED,
    NothingToDo,
    Packed,
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
from rlinf_async.backends.language_training.weights import REFERENCE, KeptWeights
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample
from rlinf_async.messages.weights import Allocate, WeightUpdate
from rlinf_async.parallel import DataRank, Strategy
from rlinf_async.weights import pack


def largest(manager: FSDPModelManager, count: int) -> int:
    """Return the largest count of all ranks. Collective."""
    found = torch.tensor([count], device=manager.device)
    ranks.all_reduce(manager, found, dist.ReduceOp.MAX)
    return int(found)


def token_answers(
    manager: FSDPModelManager,
    samples: Sequence[TrainingSample],
    limit: int,
    answer: Callable[[Packed], Tensor],
) -> list[Floats]:
    """Return ``[R]`` of each sample, in order; ``answer`` gives ``[N]`` of a micro-batch.

    Collective. Raises `OffloadedError` while the model is offloaded.
    """
    manager.check_loaded("a forward pass")
    parts = by_tokens([sample.tokens for sample in samples], limit)
    # Agreed on before the first pass: its collectives must not meet those of a forward pass.
    idle = largest(manager, len(parts)) - len(parts)
    found: dict[int, Floats] = {}
    with torch.no_grad(), manager.autocast():
        for part in parts:
            chosen = [samples[at] for at in part]
            packed = pack_samples(chosen, [whole_response(one) for one in chosen], manager.device)
            numbers = answer(packed).float().cpu().numpy()
            ends = np.cumsum([len(one.response_ids) for one in chosen])[:-1]
            found |= zip(part, np.split(numbers, ends), strict=True)
        for _ in range(idle):
            answer(_idle(manager))
    reshard(manager.model)
    return [found[at] for at in range(len(samples))]


def _idle(manager: FSDPModelManager) -> Packed:
    token = torch.zeros(1, dtype=torch.int64, device=manager.device)
    return Packed(token[None], token[None], [1], token, token, torch.ones(1, device=manager.device))


PartOf = Callable[[MicroBatch], Part | NothingToDo]


def optimizer_step(
    manager: FSDPModelManager,
    micro_batches: Iterable[MicroBatch],
    part_of: PartOf,
    engine_tolerance: float | None = None,
    version: int = 0,
) -> dict[str, float]:
    """Make one optimizer step; return its metrics, equal on every rank. Collective.

    Without any trained token in the whole global batch there is no step (``empty`` is 1). Raises,
    before the weights change, `TrainingDiverged` when the loss is not finite, and `EngineDisagrees`
    when the engine's log-probs of this ``version`` differ by more than the tolerance.
    """
    manager.check_loaded("a training step")
    totals = Totals()
    for micro_batch in micro_batches:
        with manager.before_micro_batch(manager.model, micro_batch.is_last):
            part = part_of(micro_batch)
            if isinstance(part, Part):
                manager.backward(part.loss)
        totals.add(part)
    if manager.world_size > 1:
        row = totals.row(manager.device)
        ranks.all_reduce(manager, row)
        totals.take(row)
    metrics = totals.metrics()
    try:
        check_finite(metrics, manager.steps)
        check_engine(metrics, engine_tolerance, version)
    except Exception:
        manager.zero_grad()
        raise
    if totals.units == 0:
        manager.zero_grad()
        return metrics | {"empty": 1.0, "skipped": 0.0, "grad_norm": 0.0, "lr": _lr(manager)}
    before = manager.skipped_steps
    # FSDP takes the mean of the ranks' gradients; here it is their sum that is divided.
    grad_norm, lrs = manager.optimizer_step(manager.world_size / totals.units)
    skipped = manager.skipped_steps - before
    return metrics | {
        "empty": 0.0,
        "skipped": float(skipped),
        "grad_norm": grad_norm,
        "lr": lrs[0],
    }


def _lr(manager: FSDPModelManager) -> float:
    return float(manager.optimizer.param_groups[0]["lr"])


class LanguageTrainerBase(IterationTrainer[LanguageTrainerConfig]):
    """What a policy and a critic have in common. torch.distributed is up on several ranks."""

    def __init__(self, config: LanguageTrainerConfig, world_size: int, rank: int) -> None:
        super().__init__(config)
        self.objective = (ValueObjective if self.critic else PolicyObjective)(config)
        self.manager = FSDPModelManager(config.fsdp, world_size, rank, self._build_network)
        self.manager.setup_model_and_optimizer()
        self.manager.model_files = describing_files(config.fsdp.model, self.language)
        self.kept_weights = KeptWeights(self.manager)

    def _build_network(self) -> nn.Module:
        """Return the network, on the CPU; random weights come from the trainer's seed.

        Raises `ValueError` for a folder that cannot be used and an architecture that this backend
        would train wrongly.
        """
        chunk_bytes = self.config.logit_chunk_bytes
        with building(self.config.seed):
            language, packs = build_language_model(self.config.fsdp.model)
        policy = PolicyNetwork(language, packs=packs, logit_chunk_bytes=chunk_bytes)
        check_same_as_transformers(policy)
        if not self.critic:
            return policy
        with building(self.config.seed):
            return ValueNetwork(language, packs=packs)  # which takes the policy's head away

    @property
    def language(self) -> nn.Module:
        """The model of transformers inside the network."""
        language: nn.Module = unwrapped(self.manager.model).language  # type: ignore[assignment]
        return language

    @property
    def data_rank(self) -> DataRank:
        """Every rank that trains has samples of its own."""
        return DataRank(self.manager.rank, self.manager.world_size, self.manager.active)

    def normalize_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return this rank's part of a global batch, normalised over all of it. Collective."""
        moments = advantage_moments(samples)
        if self.manager.world_size > 1:
            row = torch.tensor(moments, dtype=torch.float64, device=self.manager.device)
            ranks.all_reduce(self.manager, row)
            moments = AdvantageMoments(*row.tolist())
        return whitened(samples, moments)

    def agree(self, count: int, /) -> int:
        """Return the largest count of all ranks. Collective."""
        return largest(self.manager, count)

    def training_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Make one optimizer step; see `step.optimizer_step`. Collective."""
        part = partial(self._part, version=self.compared_version)
        metrics = optimizer_step(
            self.manager, micro_batches, part, self.config.engine_tolerance, self._version
        )
        self._stepped = True
        return metrics

    def _part(
        self,
        micro_batch: MicroBatch,
        loss: LanguageLossConfig | None = None,
        version: int | None = None,
    ) -> Part | NothingToDo:
        """Return the loss of one micro-batch, which `training_step` adds up."""
        manager = self.manager
        forward = self.objective.prepare(
            micro_batch.samples,
            manager.device,
            loss=loss,
            always=manager.world_size > 1,
            version=version,
        )
        if isinstance(forward, NothingToDo):
            return forward
        with manager.autocast():
            found = manager.model(forward.packed)
        return forward.answer(found)

    @property
    def strategy(self) -> Strategy:
        """The strategy that is in force."""
        return self.manager.strategy

    def check_strategy(self, strategy: Strategy) -> None:
        """Raise `StrategyError` for other sizes than dp; `LanguageBatches` has what must divide."""
        check_strategy(strategy, self.manager.groups.launched)

    def rescale(
        self, strategy: Strategy, *, timeout: float, bucket_bytes: int, objection: str = ""
    ) -> RescaleReport:
        """Let the first ``strategy.dp`` ranks train from now on; see `fsdp.rescale`.

        Reference weights move too. Collective over all launched ranks.
        """
        report = rescale(
            self.manager,
            strategy,
            timeout=timeout,
            bucket_bytes=bucket_bytes,
            extra=self._told(),
            objection=objection,
        )
        self._take(report.extras[0])
        return report

    def sleep(self, parts: Collection[str] = PARTS) -> None:
        """Move these parts to the CPU; gradients are dropped with the weights."""
        if OPTIMIZER in parts:
            self.manager.offload_optimizer()
        if WEIGHTS in parts:
            self.manager.offload_param_and_grad()
        torch.cuda.empty_cache()  # torch keeps what is freed; nothing happens without CUDA

    def wake_up(self, parts: Collection[str] = PARTS) -> None:
        """Take these parts back to the device."""
        if WEIGHTS in parts:
            self.manager.load_param_and_grad()
        if OPTIMIZER in parts:
            self.manager.load_optimizer()

    @property
    def asleep(self) -> frozenset[str]:
        """The parts that are on the CPU; moments that there are not yet count as awake."""
        sleeping = {
            WEIGHTS: self.manager.param_offloaded,
            OPTIMIZER: self.manager.optimizer_offloaded,
        }
        return frozenset(part for part, one in sleeping.items() if one)

    def save_checkpoint(self, path: Path, extra: Mapping[str, object] | None = None) -> None:
        """Write a checkpoint folder, atomically; ``extra`` is this rank's own. Collective."""
        content = self._content(extra)
        self.manager.save_checkpoint(path, content)

    def begin_checkpoint(
        self, path: Path, extra: Mapping[str, object] | None = None
    ) -> Future[Path]:
        """Start writing what `save_checkpoint` writes, and return. Collective."""
        content = self._content(extra)
        return self.manager.begin_checkpoint(path, content)

    def load_checkpoint(self, path: Path) -> list[dict[str, object]]:
        """Continue where the checkpoint was written; return its ranks' extras. Collective."""
        extras: list[dict[str, Any]] = self.manager.load_checkpoint(path)
        self._take_content(extras[0])
        return [extra["extra"] for extra in extras]


class PolicyTrainer(LanguageTrainerBase):
    """A `LanguageTrainer`: policy-gradient losses over packed samples, for one rank of an actor."""

    def __init__(self, config: LanguageTrainerConfig, world_size: int, rank: int) -> None:
        super().__init__(config, world_size, rank)
        if config.reference:
            self.kept_weights.backup(REFERENCE)
        self._published: WeightUpdate | None = None

    def supervised_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Make one optimizer step on the cross-entropy of the responses. Collective."""
        metrics = optimizer_step(self.manager, micro_batches, partial(self._part, loss=SUPERVISED))
        self._stepped = True
        return metrics

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Return log-probs ``[R]`` of each response, by this model or the reference. Collective.

        Raises `FSDPError` for the reference where none is kept.
        """

        def answer(packed: Packed) -> Tensor:
            found: TokenStatistics = self.manager.model(packed)
            return found.log_prob

        limit = self.config.max_tokens_per_forward
        if not reference:
            return token_answers(self.manager, samples, limit, answer)
        if REFERENCE not in self.kept_weights.tags:
            raise FSDPError(
                "reference log-probs were asked for, but no reference weights are kept: set "
                "reference = true in the trainer's configuration"
            )
        self.manager.check_loaded("reference log-probs")
        with self.kept_weights.swapped_in():
            return token_answers(self.manager, samples, limit, answer)

    def values(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Raise `FSDPError`: a policy has no values."""
        raise FSDPError("a policy has no values: ask a critic (backend 'fsdp_critic')")

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Return the weights of the present version; no buckets but on rank 0. Collective."""
        if not self.manager.active:
            return pack({}, self._version)
        dtype, size = DTYPES[self.config.publish_precision], self.config.bucket_bytes
        update = publish_shards(
            self.manager, dtype, self._version, size, allocate=allocate, previous=self._published
        )
        if update is None:
            state = hugging_face_state(self.manager, dtype)
            update = pack(state, self._version, size, allocate=allocate, previous=self._published)
        self._published = update
        return update

    def load(self, update: WeightUpdate) -> None:
        """Take published weights and their version; for a rank on its own."""
        self.manager.settle_checkpoint()
        load_hugging_face_state(self.manager, update)
        self._version, self._stepped = update.version, False

    def save_pretrained(self, folder: Path) -> None:
        """Write config, weights and tokenizer as Hugging Face does, from rank 0. Collective.

        The tokenizer is that of the folder that the model came from, if there is one.
        """
        if not self.manager.active:
            return
        state = hugging_face_state(self.manager)
        with ranks.fail_together(self.manager, f"writing {folder}"):
            if self.manager.rank == 0:
                write_model_folder(self.language, state, self.manager.model_files, folder)


NOT_A_POLICY = "a critic has no {what}: ask the actor (backend 'fsdp')"


class CriticTrainer(LanguageTrainerBase):
    """Half the squared error of values, over packed samples, for one rank of a critic."""

    critic = True

    def values(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Return values ``[R]`` before each response token. Collective."""

        def answer(packed: Packed) -> Tensor:
            value: Tensor = self.manager.model(packed)
            return value

        return token_answers(self.manager, samples, self.config.max_tokens_per_forward, answer)

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Raise `FSDPError`."""
        raise FSDPError(NOT_A_POLICY.format(what="log-probs"))

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Raise `FSDPError`: no engine takes a critic."""
        raise FSDPError(NOT_A_POLICY.format(what="weights to publish"))

    def load(self, update: WeightUpdate) -> None:
        """Raise `FSDPError`."""
        raise FSDPError(NOT_A_POLICY.format(what="use for published weights"))

    def save_pretrained(self, folder: Path) -> None:
        """Raise `FSDPError`: a value head has no place in a Hugging Face folder."""
        raise FSDPError(NOT_A_POLICY.format(what="Hugging Face folder"))
