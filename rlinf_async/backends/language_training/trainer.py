"""One rank's trainer of a language model, whichever library computes.

::

    LanguageModelTrainer    versions, steps, strategies; its abstract methods are what a library
        |                   does: see `fsdp.language.trainer` and `megatron.trainer`
        |--- Policy         log-probs, published weights, Hugging Face folders
        |--- Critic         values

    class PolicyTrainer(FSDPLanguageTrainer, Policy[...]): ...
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.algorithms.language.advantages import (
    AdvantageMoments,
    advantage_moments,
    compute_group_advantages,
    whitened,
)
from rlinf_async.algorithms.off_policy import leave_out
from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.checkpoint.collectives import Rank, fail_together
from rlinf_async.backends.checkpoint.writing import ModelFiles
from rlinf_async.backends.language import OPTIMIZER, PARTS, MicroBatch, VersionCounter
from rlinf_async.backends.language_training.config import LanguageTrainingConfig
from rlinf_async.backends.language_training.lora import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    folded,
    write_adapter,
)
from rlinf_async.backends.language_training.model import write_model_folder
from rlinf_async.backends.language_training.objective import (
    SUPERVISED,
    PolicyObjective,
    TokenStatistics,
    ValueObjective,
    check_engine,
    check_finite,
)
from rlinf_async.backends.language_training.weights import (
    REFERENCE,
    STEP,
    HoldsWeights,
    KeptWeights,
    OwnParts,
    publish_in_place,
)
from rlinf_async.data.images import ImageProcessor
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample
from rlinf_async.messages.weights import Allocate, WeightUpdate
from rlinf_async.parallel import Strategy
from rlinf_async.weights.pack import pack


class ModelManager(HoldsWeights, Rank, Protocol):
    """One rank's model and optimizer, as every library has them."""

    steps: int
    """optimizer steps taken"""
    skipped_steps: int
    """optimizer steps skipped because the gradient norm was not finite"""

    @property
    def model_files(self) -> ModelFiles:
        """Files of a Hugging Face folder beside the weights."""
        ...

    @property
    def active(self) -> bool:
        """Whether this rank holds a part of the model, and trains."""
        ...

    @property
    def strategy(self) -> Strategy:
        """The strategy that is in force."""
        ...

    def zero_grad(self) -> None:
        """Zero all gradients."""
        ...


C = TypeVar("C", bound=LanguageTrainingConfig)
M = TypeVar("M", bound=ModelManager)


class Accumulated(NamedTuple):
    """Gradients of a global batch that wait for their optimizer step; the same on every rank."""

    metrics: dict[str, float]
    units: float
    """what the gradients are to be divided by"""


class LanguageModelTrainer(VersionCounter, Generic[C, M]):
    """A `LanguageTrainer` but for what only a policy or only a critic does.

    torch.distributed is up on several ranks.
    """

    backend: ClassVar[str]
    """name of the policy's trainer; the critic's has ``_critic`` behind it"""
    refusal: ClassVar[type[Exception]] = ValueError
    """raised for what this kind of model cannot do"""
    critic: ClassVar[bool] = False

    def __init__(self, config: C, world_size: int, rank: int) -> None:
        super().__init__()
        self.config = config
        self.manager = self._build(world_size, rank)  # first: it says what is wrong with a folder
        objective = ValueObjective if self.critic else PolicyObjective
        self.objective = objective(config, self._processor())
        self.kept_weights = KeptWeights(self.manager)
        """copies of weights on the CPU, the reference's among them"""
        self._stepped = False
        """an optimizer step has changed the weights since they were those of ``version``"""

    def end_iteration(self) -> None:
        """Count the version up."""
        super().end_iteration()
        self._stepped = False

    @property
    def compared_version(self) -> int | None:
        """The version that the weights are of; None between two steps of an iteration. Tokens of
        this version have the same log-probs here as in the engine."""
        return None if self._stepped else self.version

    @property
    def strategy(self) -> Strategy:
        """The strategy that is in force."""
        return self.manager.strategy

    def rescale(
        self, strategy: Strategy, *, timeout: float, bucket_bytes: int, objection: str = ""
    ) -> RescaleReport:
        """Train under another strategy from now on. Collective over all launched ranks.

        Kept weights move too, and the first ranks tell the others the version. Raises what
        `rescale.Rescale.run` does.
        """
        report = self._rescale(
            strategy,
            timeout=timeout,
            bucket_bytes=bucket_bytes,
            extra=msgspec.msgpack.encode((self.version, self._stepped)),
            objection=objection,
        )
        told = msgspec.msgpack.decode(report.extras[0], type=tuple[int, bool])
        self.version, self._stepped = told
        return report

    # ---- advantages

    def compute_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples of whole groups with advantages and returns, never normalised."""
        return compute_group_advantages(samples, self.config.advantage)

    @property
    def normalizes(self) -> bool:
        """Advantages are normalised over the global batch."""
        return self.config.advantage.whitens and not self.critic

    def normalize_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return this rank's part of a global batch, normalised over all of it. Collective among
        the ranks that read samples."""
        return whitened(samples, AdvantageMoments(*self._summed(advantage_moments(samples))))

    # ---- training

    def training_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Make one optimizer step. Collective. Raises `OffloadedError` while offloaded."""
        return self._step(micro_batches, None, self.compared_version)

    def _step(
        self,
        micro_batches: Iterable[MicroBatch],
        loss: LanguageLossConfig | None,
        version: int | None = None,
    ) -> dict[str, float]:
        """Make one optimizer step; return its metrics, equal on every rank.

        Without any trained token in the whole global batch there is no step (``empty`` is 1).
        """
        manager = self.manager
        found = self._gradients("an optimizer step", micro_batches, loss, version)
        lr, skipped, grad_norm = self._lr, manager.skipped_steps, 0.0
        if found.units:
            grad_norm = self._optimizer_step(found.units)
        else:
            manager.zero_grad()
        self._stepped = True
        return found.metrics | {
            "empty": float(not found.units),
            "skipped": float(manager.skipped_steps - skipped),
            "grad_norm": grad_norm,
            "lr": lr,
        }

    def _gradients(
        self,
        doing: str,
        micro_batches: Iterable[MicroBatch],
        loss: LanguageLossConfig | None,
        version: int | None,
    ) -> Accumulated:
        """Compute the gradients of one global batch, undivided.

        Raises `TrainingDiverged` for a loss that is not finite, `EngineDisagrees` where the
        engine's log-probs of this version are others, and what ``micro_batches`` raises: there are
        no gradients then.
        """
        self._begin_batch(doing)
        try:
            found = self._accumulate(micro_batches, loss, version)
            check_finite(found.metrics, self.manager.steps)
            check_engine(found.metrics, self.config.engine_tolerance, self.version)
        except Exception:
            self.manager.zero_grad()
            raise
        return found

    # ---- log-probs of the weights that an iteration began with

    @property
    def recomputes(self) -> bool:
        """The loss needs `first_log_probs`."""
        return self.objective.recomputes

    def first_log_probs(
        self, samples: Sequence[TrainingSample], *, batch: int, batches: int
    ) -> list[Floats]:
        """Return log-probs ``[R]`` under the weights that the iteration began with.

        Until the last batch a copy of these is kept on the CPU. Collective.
        """
        if batch == 0:
            if batches > 1:
                self.kept_weights.backup(STEP)
            return self.log_probs(samples)
        with self.kept_weights.swapped_in(STEP):
            found = self.log_probs(samples)
        if batch == batches - 1:
            self.kept_weights.drop(STEP)
        return found

    def leave_out(self, samples: Sequence[TrainingSample]) -> int:
        """Clear the ``loss_mask`` of samples that the masks of the loss leave out; return how many
        these are."""
        return leave_out(samples, self.config.loss)

    # ---- where weights and moments are

    def offload(self, *, keep_weights: bool = False) -> None:
        """Move optimizer state and weights to the CPU, and drop the gradients."""
        self.sleep({OPTIMIZER} if keep_weights else PARTS)

    def onload(self) -> None:
        """Take weights and optimizer state back to the device."""
        self.wake_up()

    # ---- checkpoints

    def _content(self, extra: Mapping[str, object] | None) -> dict[str, object]:
        """Return what a checkpoint holds beside weights and optimizer, for `load_checkpoint`."""
        return {"version": self.version, "stepped": self._stepped, "extra": dict(extra or {})}

    def load_checkpoint(self, path: Path) -> list[dict[str, object]]:
        """Continue where a checkpoint was written, under any strategy and by any library; return
        its ranks' extras. Collective."""
        contents = self._load(path)
        self.version = contents[0]["version"]
        self._stepped = contents[0].get("stepped", False)
        return [one["extra"] for one in contents]

    # ---- what differs between libraries

    def _processor(self) -> ImageProcessor | None:
        """Return the processor of a model that sees images; None: it does not."""
        return None

    @property
    @abstractmethod
    def language(self) -> nn.Module:
        """The model of transformers; its parameters may be without memory."""

    @abstractmethod
    def agree(self, count: int, /) -> int:
        """Return the largest count of the ranks that read samples. Collective among those."""

    @abstractmethod
    def sleep(self, parts: Collection[str] = PARTS) -> None:
        """Move these parts to the CPU."""

    @abstractmethod
    def wake_up(self, parts: Collection[str] = PARTS) -> None:
        """Take these parts back to the device."""

    @abstractmethod
    def _build(self, world_size: int, rank: int) -> M:
        """Build this rank's part of the model."""

    @abstractmethod
    def _rescale(self, strategy: Strategy, **options: Any) -> RescaleReport:
        """Carry out `rescale`; ``extra`` of the old active ranks comes to all in the report."""

    @abstractmethod
    def _summed(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums over the ranks that read samples. Collective among those."""

    @abstractmethod
    def _begin_batch(self, doing: str) -> None:
        """Have no gradients; raise, before anything is read, where the rank cannot compute any."""

    @abstractmethod
    def _accumulate(
        self,
        micro_batches: Iterable[MicroBatch],
        loss: LanguageLossConfig | None,
        version: int | None,
    ) -> Accumulated:
        """Add up the undivided gradients of a global batch's micro-batches; see `_gradients`."""

    @property
    @abstractmethod
    def _lr(self) -> float:
        """Learning rate of the next optimizer step."""

    @abstractmethod
    def _optimizer_step(self, units: float) -> float:
        """Divide the gradients, clip and step; return their norm before clipping."""

    @abstractmethod
    def _answers(
        self, samples: Sequence[TrainingSample], read: Callable[[Any], Tensor]
    ) -> list[Floats]:
        """Return ``[R]`` of each sample, in order; ``read`` takes ``[N]`` from what the model says
        of a micro-batch. Collective."""

    @abstractmethod
    def _own_parts(self, dtype: torch.dtype) -> OwnParts | None:
        """Return what this rank writes of published weights; None where they have to be gathered.
        Collective over the active ranks."""

    @abstractmethod
    def _whole_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the weights by their names in a checkpoint on rank 0, ``{}`` elsewhere. Collective
        over the active ranks."""

    @abstractmethod
    def _load(self, path: Path) -> list[dict[str, Any]]:
        """Load model and optimizer; return what each rank saved besides. Collective."""


class LanguagePolicyTrainer(LanguageModelTrainer[C, M]):
    """Policy-gradient losses over packed samples, for one rank of an actor."""

    def __init__(self, config: C, world_size: int, rank: int) -> None:
        super().__init__(config, world_size, rank)
        self._published: WeightUpdate | None = None
        if config.reference:
            self.kept_weights.backup(REFERENCE)

    def supervised_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Make one optimizer step on the cross-entropy of the responses. Collective."""
        return self._step(micro_batches, SUPERVISED)

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Return log-probs ``[R]`` of each response, by this model or the reference. Collective.

        Ranks that do not read samples return those of the rank of their model that does. Raises
        `refusal` for the reference where none is kept.
        """
        if not reference:
            return self._answers(samples, _log_probs)
        if REFERENCE not in self.kept_weights.tags:
            raise self.refusal(
                "reference log-probs were asked for, but no reference weights are kept: set "
                "reference = true in the trainer's configuration"
            )
        # Which experts the policy's engine has chosen is no property of the reference.
        own = [
            one if one.routes is None else msgspec.structs.replace(one, routes=None)
            for one in samples
        ]
        with self.kept_weights.swapped_in():
            return self._answers(own, _log_probs)

    def values(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Raise `refusal`: a policy has no values."""
        raise self.refusal(
            f"a policy has no values: ask a critic (backend '{self.backend}_critic')"
        )

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Return the weights of the present version; no buckets but on rank 0. Collective."""
        if not self.manager.active:
            return pack({}, self.version)
        dtype: torch.dtype = getattr(torch, self.config.publish_precision)
        version, size, before = self.version, self.config.bucket_bytes, self._published
        if self.config.lora.publish == "adapter":
            factors = folded(self._adapter(), self.config.lora)
            state = {name: one.to(dtype) for name, one in factors.items()}
            self._published = pack(state, version, size, allocate=allocate, previous=before)
            return self._published
        update, own = None, self._own_parts(dtype)
        if own is not None:
            update = publish_in_place(
                self.manager, own, version, size, allocate=allocate, previous=before
            )
        if update is None:
            state = self._whole_weights(dtype)
            update = pack(state, version, size, allocate=allocate, previous=before)
        self._published = update
        return update

    def save_pretrained(self, folder: Path) -> None:
        """Write config, weights and tokenizer as Hugging Face does, from rank 0. Collective.

        The tokenizer is that of the folder that the model came from, if there is one. An adapter is
        merged into the weights, and stands in a folder of its own inside as well.
        """
        if not self.manager.active:
            return
        dtype: torch.dtype = getattr(torch, self.config.export_precision)
        state, adapter = self._whole_weights(dtype), self._adapter()
        most = self.config.export_shard_bytes
        with fail_together(self.manager, f"writing {folder}"):
            if self.manager.rank == 0:
                files = dict(self.manager.model_files)
                described = files.pop(ADAPTER_CONFIG, b"")
                write_model_folder(self.language, state, files, folder, most)
                if isinstance(described, bytes) and adapter:
                    write_adapter(adapter, described, folder / ADAPTER_FOLDER)

    def _adapter(self) -> dict[str, Tensor]:
        """Return an adapter's tensors by their names in the model, on rank 0; ``{}`` elsewhere, and
        where there is none. Collective over the active ranks."""
        return {}


class Critic(LanguageModelTrainer[C, M]):
    """Half the squared error of values, over packed samples, for one rank of a critic.

    Its targets are the ``returns`` that `compute_advantages` computes from rewards and from the
    values of this critic when the samples were collected.
    """

    critic = True

    def values(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Return values ``[R]`` before each response token. Collective. Ranks that do not read
        samples return those of the rank of their model that does."""
        return self._answers(samples, _as_they_are)

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Raise `refusal`."""
        raise self._not_a_policy("log-probs")

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Raise `refusal`: no engine takes a critic."""
        raise self._not_a_policy("weights to publish")

    def load(self, update: WeightUpdate) -> None:
        """Raise `refusal`."""
        raise self._not_a_policy("use for published weights")

    def save_pretrained(self, folder: Path) -> None:
        """Raise `refusal`: a value head has no place in a Hugging Face folder."""
        raise self._not_a_policy("Hugging Face folder")

    def _not_a_policy(self, what: str) -> Exception:
        return self.refusal(f"a critic has no {what}: ask the actor (backend '{self.backend}')")


def _log_probs(found: TokenStatistics) -> Tensor:
    return found.log_prob


def _as_they_are(found: Tensor) -> Tensor:
    return found
