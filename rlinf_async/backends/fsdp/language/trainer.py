"""`PolicyTrainer`: the `LanguageTrainer` of an actor, over FSDP."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlinf_async.algorithms.language.advantages import (
    AdvantageMoments,
    advantage_moments,
    compute_group_advantages,
    whitened,
)
from rlinf_async.algorithms.language.aggregation import share_of
from rlinf_async.algorithms.language.config import LanguageLossConfig
from rlinf_async.algorithms.language.losses import TokenLossInputs, token_loss
from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.building import building
from rlinf_async.backends.fsdp import ranks
from rlinf_async.backends.fsdp.errors import FSDPError
from rlinf_async.backends.fsdp.language.config import LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.describing import add_missing_files, describing_files
from rlinf_async.backends.fsdp.language.forward import largest, token_answers
from rlinf_async.backends.fsdp.language.head import TokenStatistics
from rlinf_async.backends.fsdp.language.model import build_language_model, without_progress_bars
from rlinf_async.backends.fsdp.language.network import (
    PolicyNetwork,
    ValueNetwork,
    check_same_as_transformers,
)
from rlinf_async.backends.fsdp.language.packing import Packed, pack_samples
from rlinf_async.backends.fsdp.language.publishing import (
    hugging_face_state,
    load_hugging_face_state,
)
from rlinf_async.backends.fsdp.language.reference import REFERENCE, KeptWeights
from rlinf_async.backends.fsdp.language.sharded_publishing import publish_shards
from rlinf_async.backends.fsdp.language.step import NothingToDo, Part, optimizer_step
from rlinf_async.backends.fsdp.manager import DTYPES, FSDPModelManager
from rlinf_async.backends.fsdp.rescale import rescale
from rlinf_async.backends.fsdp.sharding import unwrapped
from rlinf_async.backends.language import MicroBatch
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample
from rlinf_async.messages.weights import Allocate, WeightUpdate
from rlinf_async.weights import pack

SUPERVISED = LanguageLossConfig(name="supervised")

SILENT_AT_ZERO = frozenset({"ppo", "gspo", "reinforce"})
"""losses without a gradient where the advantage is 0"""


class LanguageTrainerBase(ABC):
    """What a policy and a critic have in common. torch.distributed is up on several ranks."""

    critic = False

    def __init__(self, config: LanguageTrainerConfig, world_size: int, rank: int) -> None:
        self.config = config
        self.manager = FSDPModelManager(config.fsdp, world_size, rank, self._build_network)
        self.manager.setup_model_and_optimizer()
        self.manager.model_files = describing_files(config.fsdp.model, self.language)
        self._version = 0

    def _build_network(self) -> nn.Module:
        """Return the network, on the CPU; random weights come from the trainer's seed.

        Raises `ValueError` for a folder that cannot be used and an architecture that this backend
        would train wrongly.
        """
        with building(self.config.seed):
            language, packs = build_language_model(self.config.fsdp.model)
        chunk_bytes = self.config.logit_chunk_bytes
        policy = PolicyNetwork(language, packs=packs, logit_chunk_bytes=chunk_bytes)
        check_same_as_transformers(policy)
        return ValueNetwork(language, packs=packs) if self.critic else policy

    @property
    def language(self) -> nn.Module:
        """The model of transformers inside the network."""
        language: nn.Module = unwrapped(self.manager.model).language  # type: ignore[assignment]
        return language

    @property
    def version(self) -> int:
        """Number of iterations that were trained, or the version that `load` took."""
        return self._version

    def compute_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples of whole groups with advantages and returns, never normalised."""
        return compute_group_advantages(samples, self.config.advantage)

    @property
    def normalizes(self) -> bool:
        """Advantages are normalised over the global batch."""
        return self.config.advantage.whitens and not self.critic

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
        return optimizer_step(self.manager, micro_batches, self._part)

    @abstractmethod
    def _part(self, micro_batch: MicroBatch) -> Part | NothingToDo:
        """Return the loss of one micro-batch, which `training_step` adds up."""

    def end_iteration(self) -> None:
        """Count the version up."""
        self._version += 1

    def check_ranks(self, world_size: int) -> None:  # noqa: B027  # no limit
        """Accept any number of ranks: `LanguageBatches` has the sizes that must divide."""

    def skip_iteration(self) -> None:
        """Count an iteration that the active ranks train, on an idle one."""
        self.end_iteration()

    def rescale(
        self, world_size: int, *, timeout: float, bucket_bytes: int, objection: str = ""
    ) -> RescaleReport:
        """Let the first ``world_size`` ranks train from now on; see `fsdp.rescale`.

        Reference weights move too. Collective over all launched ranks.
        """
        report = rescale(
            self.manager,
            world_size,
            timeout=timeout,
            bucket_bytes=bucket_bytes,
            extra=msgspec.msgpack.encode(self._version),
            objection=objection,
        )
        self._version = msgspec.msgpack.decode(report.extras[0], type=int)
        return report

    def offload(self, *, keep_weights: bool = False) -> None:
        """Move optimizer state and weights to the CPU, and drop the gradients."""
        self.manager.offload_optimizer()
        if not keep_weights:
            self.manager.offload_param_and_grad()
        torch.cuda.empty_cache()  # torch keeps what is freed; nothing happens without CUDA

    def onload(self) -> None:
        """Take weights and optimizer state back to the device."""
        self.manager.load_param_and_grad()
        self.manager.load_optimizer()

    def save_checkpoint(self, path: Path, extra: Mapping[str, object] | None = None) -> None:
        """Write a checkpoint folder, atomically; ``extra`` is this rank's own. Collective."""
        content = {"version": self._version, "extra": dict(extra or {})}
        self.manager.save_checkpoint(path, content)

    def begin_checkpoint(
        self, path: Path, extra: Mapping[str, object] | None = None
    ) -> Future[Path]:
        """Start writing what `save_checkpoint` writes, and return. Collective."""
        content = {"version": self._version, "extra": dict(extra or {})}
        return self.manager.begin_checkpoint(path, content)

    def load_checkpoint(self, path: Path) -> list[dict[str, object]]:
        """Continue where the checkpoint was written; return its ranks' extras. Collective."""
        extras: list[dict[str, Any]] = self.manager.load_checkpoint(path)
        self._version = extras[0]["version"]
        return [extra["extra"] for extra in extras]

    def _whole_batch(
        self,
        samples: Sequence[TrainingSample],
        silent: Sequence[bool],
        config: LanguageLossConfig,
    ) -> tuple[list[TrainingSample], float]:
        """Return the samples that go through the model, and the units of all."""
        masks = [trained_tokens(sample) for sample in samples]
        units = sum(share_of(int(mask.sum()), config.aggregation).units for mask in masks)
        forwarded = [
            sample
            for sample, mask, quiet in zip(samples, masks, silent, strict=True)
            if mask.any() and not quiet
        ]
        if not forwarded and self.manager.world_size > 1:
            # Every rank takes part in every forward and backward pass, be it for no gradient.
            forwarded = [samples[0]]
        return forwarded, units


class PolicyTrainer(LanguageTrainerBase):
    """A `LanguageTrainer`: policy-gradient losses over packed samples, for one rank of an actor."""

    def __init__(self, config: LanguageTrainerConfig, world_size: int, rank: int) -> None:
        super().__init__(config, world_size, rank)
        self.kept_weights = KeptWeights(self.manager)
        """copies of weights on the CPU, the reference's among them"""
        if config.reference:
            self.kept_weights.backup(REFERENCE)
        self._published: WeightUpdate | None = None

    def supervised_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Make one optimizer step on the cross-entropy of the responses. Collective."""
        return optimizer_step(self.manager, micro_batches, partial(self._part, loss=SUPERVISED))

    def _part(
        self, micro_batch: MicroBatch, loss: LanguageLossConfig | None = None
    ) -> Part | NothingToDo:
        samples, config = micro_batch.samples, loss or self.config.loss
        self._check_ready(samples)
        silent = [self._silent(one, config) for one in samples]
        forwarded, units = self._whole_batch(samples, silent, config)
        if not forwarded:
            return NothingToDo(units)
        masks = [trained_tokens(sample) for sample in forwarded]
        packed = pack_samples(forwarded, masks, self.manager.device)
        with self.manager.autocast():
            now: TokenStatistics = self.manager.model(packed)
        found = token_loss(self._inputs(forwarded, masks, now, config), config)
        total = (found.loss * token_weights(masks, config, found.loss.device)).sum()
        metrics = {name: numbers.sum() for name, numbers in found.metrics.items()}
        return Part(total, units, len(packed.rows), metrics)

    def _inputs(
        self,
        samples: Sequence[TrainingSample],
        masks: Sequence[NDArray[np.bool_]],
        now: TokenStatistics,
        config: LanguageLossConfig,
    ) -> TokenLossInputs:
        def column(name: str, fallback: str | None = None) -> Tensor:
            parts = []
            for sample, mask in zip(samples, masks, strict=True):
                found = getattr(sample, name)
                if found is None and fallback is not None:
                    found = getattr(sample, fallback)
                assert found is not None, name  # checked before, or asked for only where it is
                parts.append(found[mask])
            return torch.from_numpy(np.concatenate(parts)).to(self.manager.device)

        behaviour = column("log_prob")
        proximal = {
            "auto": lambda: column("prev_log_prob", "log_prob"),
            "behaviour": lambda: behaviour,
            "current": lambda: now.log_prob.detach(),
        }[config.proximal]()
        with_reference = all(sample.ref_log_prob is not None for sample in samples)
        counts = torch.tensor([int(mask.sum()) for mask in masks])
        return TokenLossInputs(
            log_prob=now.log_prob,
            entropy=now.entropy,
            proximal_log_prob=proximal,
            behaviour_log_prob=behaviour,
            ref_log_prob=column("ref_log_prob") if with_reference else None,
            advantage=column("advantage"),
            sample=torch.repeat_interleave(counts).to(self.manager.device),
            samples=len(samples),
        )

    def _silent(self, sample: TrainingSample, loss: LanguageLossConfig) -> bool:
        quiet = loss.name in SILENT_AT_ZERO and not (
            loss.kl_coefficient or loss.entropy_coefficient
        )
        return (
            self.config.skip_silent
            and quiet
            and sample.advantage is not None
            and not sample.advantage.any()
        )

    def _check_ready(self, samples: Sequence[TrainingSample]) -> None:
        for sample in samples:
            if sample.advantage is None:
                raise ValueError(
                    f"sample {sample.group}/{sample.index} has no advantage: call "
                    "compute_advantages() on its group first"
                )

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
        self._version = update.version

    def save_pretrained(self, folder: Path) -> None:
        """Write config, weights and tokenizer as Hugging Face does, from rank 0. Collective.

        The tokenizer is that of the folder that the model came from, if there is one.
        """
        if not self.manager.active:
            return
        state = hugging_face_state(self.manager)
        if self.manager.rank == 0:
            with without_progress_bars():
                cast(Any, self.language).save_pretrained(
                    folder, state_dict=state, save_original_format=False
                )
            for path in folder.glob("*.safetensors"):
                shutil.copymode(folder / "config.json", path)  # made for the owner alone
            add_missing_files(self.manager.model_files, folder)
        ranks.wait_for_all(self.manager)


def token_weights(
    masks: Sequence[NDArray[np.bool_]], config: LanguageLossConfig, device: torch.device
) -> Tensor:
    """Return the weight ``[N]`` of each trained token in the sum of the losses."""
    counts = [int(mask.sum()) for mask in masks]
    shares = [share_of(count, config.aggregation).weight for count in counts]
    return torch.from_numpy(np.repeat(np.array(shares, np.float32), counts)).to(device)


def trained_tokens(sample: TrainingSample) -> NDArray[np.bool_]:
    """Return the mask of the tokens in the loss."""
    return sample.loss_mask if sample.scored else np.zeros_like(sample.loss_mask)
