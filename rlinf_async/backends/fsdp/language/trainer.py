"""`PolicyTrainer` and `CriticTrainer`: the `LanguageTrainer` of an actor, of a critic, over FSDP.

Forward passes without gradients are divided by tokens. Every rank of a sharded model takes part in
every forward pass, so the ranks agree on their number; one without samples passes a single token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.building import building
from rlinf_async.backends.checkpoint import collectives
from rlinf_async.backends.fsdp.config import FSDPError
from rlinf_async.backends.fsdp.language.config import LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.network import (
    FLOAT_BYTES,
    PolicyNetwork,
    ValueNetwork,
    check_same_as_transformers,
)
from rlinf_async.backends.fsdp.language.publishing import (
    adapter_state,
    hugging_face_state,
    load_hugging_face_state,
    own_rows,
)
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.rescale import check_strategy, rescale
from rlinf_async.backends.fsdp.state import reshard, unwrapped
from rlinf_async.backends.language import OPTIMIZER, PARTS, WEIGHTS, MicroBatch
from rlinf_async.backends.language_training.lora import (
    ADAPTER_CONFIG,
    adapter_config,
    add_adapters,
)
from rlinf_async.backends.language_training.model import build_language_model, describing_files
from rlinf_async.backends.language_training.objective import (
    AskedTokens,
    MicroBatchSums,
    NothingToDo,
    PackedTokens,
    TokenStatistics,
    Totals,
    by_sample,
    by_tokens,
    pack_responses,
    single_token,
)
from rlinf_async.backends.language_training.trainer import (
    Accumulated,
    Critic,
    LanguageModelTrainer,
    LanguagePolicyTrainer,
)
from rlinf_async.backends.language_training.weights import OwnParts
from rlinf_async.backends.transformers.images import processor_in
from rlinf_async.data.images import ImageProcessor
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TeacherLogProbs, TrainingSample
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.parallel import DataRank, Strategy


class FSDPLanguageTrainer(LanguageModelTrainer[LanguageTrainerConfig, FSDPModelManager]):
    """The part of a trainer of a policy or a critic that FSDP does."""

    backend = "fsdp"
    refusal = FSDPError

    def _build(self, world_size: int, rank: int) -> FSDPModelManager:
        """Build this rank's part. Raises `ValueError` for a folder that cannot be used and an
        architecture that this backend would train wrongly."""
        provider = partial(build_network, self.config, critic=self.critic)
        manager = FSDPModelManager(self.config.fsdp, world_size, rank, provider)
        manager.setup_model_and_optimizer()
        model, language, lora = self.config.fsdp.model, language_in(manager), self.config.lora
        files = describing_files(model, language)
        if lora.rank:
            folder = "" if model.path is None else str(Path(model.path).absolute())
            files[ADAPTER_CONFIG] = adapter_config(language, lora, folder)
        manager.model_files = files
        return manager

    def _processor(self) -> ImageProcessor | None:
        path = self.config.fsdp.model.path
        return None if path is None else processor_in(Path(path))

    @property
    def language(self) -> nn.Module:
        """The model of transformers inside the network."""
        return language_in(self.manager)

    @property
    def data_rank(self) -> DataRank:
        """Every rank that trains has samples of its own."""
        return DataRank(self.manager.rank, self.manager.world_size, self.manager.active)

    def agree(self, count: int, /) -> int:
        """Return the largest count of all ranks. Collective."""
        found = torch.tensor([count], device=self.manager.device)
        collectives.all_reduce(self.manager, found, dist.ReduceOp.MAX)
        return int(found)

    def _summed(self, numbers: Sequence[float]) -> list[float]:
        row = torch.tensor(numbers, dtype=torch.float64, device=self.manager.device)
        collectives.all_reduce(self.manager, row)
        found: list[float] = row.tolist()
        return found

    # ---- training

    def _begin_batch(self, doing: str) -> None:
        self.manager.check_loaded(doing)

    def _accumulate(
        self,
        micro_batches: Iterable[MicroBatch],
        loss: LanguageLossConfig | None,
        version: int | None,
    ) -> Accumulated:
        manager = self.manager
        totals = Totals()
        for micro_batch in micro_batches:
            with manager.before_micro_batch(manager.model, micro_batch.is_last):
                part = self._part(micro_batch, loss, version)
                if isinstance(part, MicroBatchSums):
                    manager.backward(part.loss)
            totals.add(part)
        if manager.world_size > 1:
            row = totals.row(manager.device)
            collectives.all_reduce(manager, row)
            totals.take(row)
        return Accumulated(totals.metrics(), totals.units)

    def _part(
        self, micro_batch: MicroBatch, loss: LanguageLossConfig | None, version: int | None
    ) -> MicroBatchSums | NothingToDo:
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
    def _lr(self) -> float:
        return float(self.manager.optimizer.param_groups[0]["lr"])

    def _optimizer_step(self, units: float) -> float:
        # FSDP takes the mean of the ranks' gradients; here it is their sum that is divided.
        return self.manager.optimizer_step(self.manager.world_size / units)[0]

    # ---- forward passes without gradients

    def _packed(self, samples: Sequence[TrainingSample]) -> PackedTokens:
        return pack_responses(samples, self.manager.device, self.objective.processor)

    def _answers(
        self, samples: Sequence[TrainingSample], read: Callable[[Any], Tensor]
    ) -> list[Floats]:
        manager = self.manager
        manager.check_loaded("a forward pass")
        parts = by_tokens([one.tokens for one in samples], self.config.max_tokens_per_forward)
        # Agreed on before the first pass: its collectives must not meet those of a forward pass.
        idle = self.agree(len(parts)) - len(parts)
        answers = []
        with torch.no_grad(), manager.autocast():
            for part in parts:
                packed = self._packed([samples[at] for at in part])
                answers.append(read(manager.model(packed)).float().cpu().numpy())
            for _ in range(idle):
                manager.model(single_token(manager.device))
        reshard(manager.model)
        return by_sample(samples, parts, answers)

    # ---- the strategy

    def check_strategy(self, strategy: Strategy) -> None:
        """Raise `StrategyError` for other sizes than dp; `LanguageBatches` has what must divide."""
        check_strategy(strategy, self.manager.groups.launched)

    def _rescale(self, strategy: Strategy, **options: Any) -> RescaleReport:
        return rescale(self.manager, strategy, **options)

    # ---- where weights and moments are

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

    # ---- weights that leave and come back

    def _own_parts(self, dtype: torch.dtype) -> OwnParts | None:
        return own_rows(self.manager, dtype)

    def _whole_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return hugging_face_state(self.manager, dtype)

    def save_checkpoint(self, path: Path, extra: Mapping[str, object] | None = None) -> None:
        """Write a checkpoint folder, atomically; ``extra`` is this rank's own. Collective."""
        self.manager.save_checkpoint(path, self._content(extra))

    def begin_checkpoint(
        self, path: Path, extra: Mapping[str, object] | None = None
    ) -> Future[Path]:
        """Start writing what `save_checkpoint` writes, and return. Collective."""
        return self.manager.begin_checkpoint(path, self._content(extra))

    def _load(self, path: Path) -> list[dict[str, Any]]:
        return self.manager.load_checkpoint(path)


class PolicyTrainer(
    FSDPLanguageTrainer, LanguagePolicyTrainer[LanguageTrainerConfig, FSDPModelManager]
):
    """A `LanguageTrainer` of an actor, which single ranks of inference workers use, too."""

    def distributions(
        self, samples: Sequence[TrainingSample], *, top_k: int | None, vocabulary: int
    ) -> list[TeacherLogProbs]:
        """Return log-probs of each response, and of other tokens in the place of each of its own:
        the most likely ones, or all; for a rank on its own."""
        manager, config = self.manager, self.config
        manager.check_loaded("a forward pass")
        own = len(cast(Any, self.language).get_output_embeddings().weight)
        there = min(own, vocabulary)
        asked = AskedTokens(min(top_k or there, there), likely_of=there if top_k else 0)
        most = config.logit_chunk_bytes // (FLOAT_BYTES * asked.number)  # tokens that are held
        limit = max(min(most, config.max_tokens_per_forward), 1)
        parts = by_tokens([one.tokens for one in samples], limit)
        drawn, likely, ids = [], [], []
        with torch.no_grad(), manager.autocast():
            for part in parts:
                packed = self._packed([samples[at] for at in part])
                found: TokenStatistics = manager.model(packed._replace(asked=asked))
                assert found.asked is not None  # it was asked for
                drawn.append(found.log_prob.float().cpu().numpy())
                likely.append(found.asked.float().cpu().numpy())
                # The same ones everywhere need not be told.
                which = found.asked_ids if top_k else packed.rows.new_empty(len(packed.rows), 0)
                assert which is not None
                ids.append(which.cpu().numpy().astype(np.min_scalar_type(own - 1)))
        reshard(manager.model)
        told = (by_sample(samples, parts, one) for one in (drawn, likely, ids))
        return [TeacherLogProbs(*one) for one in zip(*told, strict=True)]

    def _adapter(self) -> dict[str, Tensor]:
        return adapter_state(self.manager) if self.config.lora.rank else {}

    def load(self, update: WeightUpdate) -> None:
        """Take published weights and their version; for a rank on its own."""
        self.manager.settle_checkpoint()
        load_hugging_face_state(self.manager, update)
        self.version, self._stepped = update.version, False


class CriticTrainer(FSDPLanguageTrainer, Critic[LanguageTrainerConfig, FSDPModelManager]):
    """A `LanguageTrainer` of a critic."""


def build_network(config: LanguageTrainerConfig, *, critic: bool) -> nn.Module:
    """Return the network, on the CPU; random weights come from the trainer's seed."""
    with building(config.seed):
        language, packs = build_language_model(config.fsdp.model)
    policy = PolicyNetwork(
        language,
        packs=packs,
        logit_chunk_bytes=config.logit_chunk_bytes,
        routing_replay=config.routing_replay,
    )
    check_same_as_transformers(policy)
    if config.lora.rank and critic:
        raise ValueError("lora is for the actor: a critic trains all its weights")
    if not critic:
        if config.lora.rank:
            with building(config.seed):
                add_adapters(language, config.lora)
        return policy
    with building(config.seed):
        return ValueNetwork(language, packs=packs)  # which takes the policy's head away


def language_in(manager: FSDPModelManager) -> nn.Module:
    """Return the model of transformers inside a manager's network."""
    language: nn.Module = unwrapped(manager.model).language  # type: ignore[assignment]
    return language
