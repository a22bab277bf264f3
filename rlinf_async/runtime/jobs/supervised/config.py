"""The configurations of the ``sft``, the ``dpo`` and the ``distill`` job, section by section.

Each is a `SupervisedConfig`. What differs is what a record holds (``data``), how many examples it
becomes (``each``), the loss, and whether there is a teacher.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import msgspec

from rlinf_async.algorithms.config import DISTIL, Divergence, LanguageLossConfig, PairLossConfig
from rlinf_async.backends.language_training.config import (
    LanguageModelConfig,
    PublishedAdapterConfig,
)
from rlinf_async.backends.parts import Learner
from rlinf_async.config import ConfigError
from rlinf_async.config.counts import MOST_WORKERS, check_bounds
from rlinf_async.data.examples import AnswersConfig, ExamplesConfig, PairsConfig
from rlinf_async.observe.sinks.config import ObserveConfig
from rlinf_async.parallel import Strategy
from rlinf_async.parallel.splits import nearest_divisors
from rlinf_async.runtime.jobs.config import HostConfig
from rlinf_async.runtime.jobs.language.config import (
    LanguageOptimizerConfig,
    LearnerConfig,
    ModelConfig,
    check_export,
    check_trainer_options,
)
from rlinf_async.runtime.jobs.placement import RolePlacement
from rlinf_async.runtime.recording import RecordingConfig
from rlinf_async.workers.actor import LanguageBatches


class SupervisedTrainingConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Length of the training, and sizes of its steps. Records are examples, or pairs of them."""

    steps: int | None = None
    """number of optimizer steps; either this or ``epochs``"""
    epochs: int | None = None
    """number of passes over the records; the last step takes the first ones of another pass, where
    the last batch would not be full"""
    batch_size: int = 64
    """records of one optimizer step, over all actors"""
    evaluate_every: int = 0
    """steps between two evaluations of the held-out records; there is one before the first step and
    one after the last in any case"""
    checkpoint_every: int = 100
    """steps between two checkpoints; one is always written at the end"""
    keep_checkpoints: int = 2
    """newest checkpoints that are kept"""
    export: bool = True
    """whether to write the model as a Hugging Face folder at the end: ``trained/`` in the run
    folder"""
    export_precision: Literal["float32", "bfloat16"] = "float32"
    """dtype of its weights"""
    export_shard_gb: float = 5.0
    """size of one of its files, at most, in 10^9 bytes"""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            given = "neither was" if self.steps is None else "both were"
            raise ValueError(
                f"how long? give one of steps, as in steps = 100, and epochs, as in epochs = 1: "
                f"{given} given"
            )
        check_bounds(self, "steps", "epochs", "batch_size", "keep_checkpoints", least=1)
        check_bounds(self, "evaluate_every", "checkpoint_every", least=0)
        check_export(self)


class SftOptimizerConfig(
    LanguageOptimizerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """AdamW with larger steps than those of reinforcement learning."""

    lr: float = 1e-5


class SftActorConfig(LearnerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The training of the model."""

    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    max_tokens: int | None = None
    """tokens of one forward and backward pass, balanced; 16384 where neither is given"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "max_tokens", least=1)
        if self.micro_batch_size is not None and self.max_tokens is not None:
            raise ConfigError(
                f"a micro-batch has either a number of examples (micro_batch_size is "
                f"{self.micro_batch_size}) or a limit of tokens ({self.max_tokens}): leave one of "
                "them out",
                path=("max_tokens",),
            )


class SupervisedPlacement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices of the actors: a text such as ``"0-3"``, or a table with more."""

    actor: str | RolePlacement = ""


class SupervisedClusterConfig(HostConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Number of actors, and where they run."""

    placement: SupervisedPlacement = SupervisedPlacement()
    actors: int | None = None
    """number of actors; when left out as many as their devices and the batch size allow, 1 without
    accelerators"""
    deadlock_after: float | None = 60.0
    """seconds without any movement after which a deadlock ends the run"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_roles(self.placement)
        check_bounds(self, "actors", least=1, most=MOST_WORKERS)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every worker's process."""
        return super().environment | {
            "TOKENIZERS_PARALLELISM": "false",  # it would warn of every fork
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # the run shows its own
        }


MAY_DIFFER = (
    "name",
    "model.path",
    "teacher.path",
    "data.path",
    "training.steps",
    "training.epochs",
    "training.evaluate_every",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.export",
    "training.export_precision",
    "training.export_shard_gb",
    "actor.backend",
    "actor.tp",
    "actor.pp",
    "actor.megatron",
    "actor.micro_batch_size",
    "actor.max_tokens",
    "actor.activation_checkpointing",
    "recording",
    "observe",
    "cluster",
)
"""settings and sections that a resumed run may change"""


class SupervisedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A language model learns from examples that are there already."""

    job: str
    name: str
    """name of the run, in reports and in the default run folder"""
    seed: int = 0
    """seed of everything; ``data.seed`` is added to it"""
    model: ModelConfig
    data: ExamplesConfig
    training: SupervisedTrainingConfig
    actor: LearnerConfig
    recording: RecordingConfig = RecordingConfig()
    observe: ObserveConfig = ObserveConfig()
    cluster: SupervisedClusterConfig = SupervisedClusterConfig()

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"{self.seed} is below 0: seeds count from 0", path=("seed",))
        if not self.actor.part.has_weights:
            raise ConfigError(
                f"{self.actor.backend!r} has no weights: nothing would be learnt; name a trainer "
                "that has, such as 'fsdp'",
                path=("actor", "backend"),
            )
        check_trainer_options(self.actor)
        if self.actor.optimizer.value_lr is not None:
            raise ConfigError(
                f"value_lr is {self.actor.optimizer.value_lr}, but the model has no values: leave "
                "it out",
                path=("actor", "optimizer", "value_lr"),
            )
        if self.training.evaluate_every and not self.data.held_out:
            raise ConfigError(
                f"evaluate_every is {self.training.evaluate_every}, but no record is held out: set "
                "data.held_out, or leave it out",
                path=("training", "evaluate_every"),
            )

    @property
    @abstractmethod
    def each(self) -> int:
        """Examples of a record."""

    @property
    @abstractmethod
    def loss_config(self) -> LanguageLossConfig:
        """The loss, and its coefficients."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with log-probs of the first weights."""
        return isinstance(self.loss_config, PairLossConfig)

    @property
    def max_tokens(self) -> int | None:
        """Tokens of one forward and backward pass, where that is how it is limited."""
        return None

    @property
    def taught_by(self) -> ExamplesTeacherConfig | None:
        """Teacher that examples are compared with; None: there is none."""
        return None

    @property
    def inference_workers(self) -> int:
        """Number of workers that hold it."""
        return 0

    @property
    def inference_placement(self) -> str | RolePlacement:
        """Their devices."""
        return ""

    @property
    def actors(self) -> int:
        """Number of actors."""
        return self.cluster.actors or self.actor.model_ranks

    @property
    def data_ranks(self) -> int:
        """Number of actors, or of groups of actors, that learn from records of their own."""
        return self.actors // self.actor.model_ranks

    @property
    def parts(self) -> Strategy:
        """Strategy by which each copy of the model is cut."""
        actor = self.actor
        return actor.part.strategy(actor.tp, actor.pp, actor.trainer)

    def fits_actors(self, count: int) -> bool:
        """Whether a batch can be divided among ``count`` actors."""
        count, left = divmod(count, self.actor.model_ranks)
        if left or self.training.batch_size % count:
            return False
        return not self.training.batch_size // count % (self.actor.micro_batch_size or 1)

    def check_sizes(self) -> None:
        """Raise `ConfigError` for sizes that do not divide, with the nearest that do."""
        actor, ranks, size = self.actor, self.data_ranks, self.training.batch_size
        if self.actors % actor.model_ranks:
            raise ConfigError(
                f"{self.actors} actors are no multiple of actor.tp x actor.pp = "
                f"{actor.model_ranks}, which hold one copy of the model",
                path=("cluster", "actors"),
            )
        if size % ranks:
            raise ConfigError(
                f"{size} records cannot be divided among {ranks} actors: use a multiple of {ranks}",
                path=("training", "batch_size"),
            )
        micro = actor.micro_batch_size
        if micro is not None and size // ranks % micro:
            raise ConfigError(
                f"a batch has {size // ranks} records on each actor, which micro_batch_size = "
                f"{micro} does not divide: use {nearest_divisors(micro, size // ranks)}",
                path=("actor", "micro_batch_size"),
            )
        if self.cluster.backend == "local" and self.actors > 1 and actor.part.collective:
            raise ConfigError(
                "several actors need a process each: use backend = 'process', or actors = 1",
                path=("cluster", "backend"),
            )

    @property
    def batches(self) -> LanguageBatches:
        """How a step is cut up: the examples of a record stay together."""
        size, micro = self.training.batch_size, self.actor.micro_batch_size
        if micro is None and self.each > 1:  # micro-batches of so many tokens would part them
            micro = size // self.data_ranks
        return LanguageBatches(
            samples=size * self.each,
            group_size=self.each,
            micro_batch_size=None if micro is None else micro * self.each,
            max_tokens_per_micro_batch=self.max_tokens,
        )

    def learner(self, folder: str, device: str, *, random: bool) -> Learner:
        """Return the model that is trained.

        Args:
            folder: the model's folder.
            device: torch's name of it, in each rank's process.
            random: whether weights are drawn.
        """
        actor = self.actor
        return Learner(
            model=LanguageModelConfig(
                path=folder,
                random=random,
                activation_checkpointing=actor.activation_checkpointing,
            ),
            device=device,
            precision=actor.precision,
            optimizer=actor.optimizer,
            scheduler=actor.scheduler,
            loss=self.loss_config,
            lora=PublishedAdapterConfig(**msgspec.structs.asdict(actor.lora)),
            export_precision=self.training.export_precision,
            export_shard_bytes=max(1, int(self.training.export_shard_gb * 1e9)),
            seed=self.seed,
            strategy=actor.strategy,
            tp=actor.tp,
            pp=actor.pp,
            options=actor.trainer,
        )


class SftConfig(SupervisedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised fine-tuning: the mean cross-entropy of the tokens of the answers."""

    job: str = "sft"
    name: str = "sft"
    data: AnswersConfig
    actor: SftActorConfig = SftActorConfig()

    @property
    def each(self) -> int:
        """Examples of a record."""
        return 1

    @property
    def loss_config(self) -> LanguageLossConfig:
        """The loss, and its coefficients."""
        return LanguageLossConfig(name="supervised", proximal="current")

    @property
    def max_tokens(self) -> int | None:
        """Tokens of one forward and backward pass, where that is how it is limited."""
        return self.actor.max_tokens


class DpoLossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loss of pairs."""

    beta: float = 0.1
    """factor of the implicit reward: of the log-ratio to the reference"""
    label_smoothing: float = 0.0
    """probability that the two answers of a pair are the wrong way round, below 0.5"""

    def __post_init__(self) -> None:
        PairLossConfig(beta=self.beta, label_smoothing=self.label_smoothing)


class DpoConfig(SupervisedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Direct preference optimization: answers that were chosen against others."""

    job: str = "dpo"
    name: str = "dpo"
    data: PairsConfig
    actor: LearnerConfig = LearnerConfig()
    loss: DpoLossConfig = DpoLossConfig()

    @property
    def each(self) -> int:
        """Examples of a record."""
        return 2

    @property
    def loss_config(self) -> LanguageLossConfig:
        """The loss, and its coefficients."""
        return PairLossConfig(
            proximal="current", beta=self.loss.beta, label_smoothing=self.loss.label_smoothing
        )


class ExamplesTeacherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that examples are compared with, token by token; inference workers hold it."""

    path: str
    """folder of its Hugging Face checkpoint, whose tokenizer is the model's"""
    top_k: int | Literal["all"] = 64
    """number of the teacher's most likely tokens of which it tells the log-probs at each token of
    an answer, or all"""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty: name the folder of a teacher")
        if self.top_k != "all":
            check_bounds(self, "top_k", least=0)
        if self.top_k == 0:
            raise ConfigError(
                "it is 0, but nothing can be estimated on answers that the model has not drawn: "
                "give a number of tokens, or 'all'",
                path=("top_k",),
            )


class DistillLossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The divergence of the model from its teacher."""

    divergence: Divergence = "forward"
    """``forward``: KL(teacher, model); ``reverse``: KL(model, teacher); ``jsd``, ``mixed``: between
    the two"""
    divergence_beta: float = 0.5
    """``jsd``: weight of the teacher in the mixture, and of its KL to it; ``mixed``: weight of the
    forward KL"""
    divergence_outside: Literal["one_token", "left_out"] = "one_token"
    """with a teacher's most likely tokens: the others count as one token, or what is compared are
    the distributions over the most likely ones"""

    def __post_init__(self) -> None:
        self.loss()

    def loss(self) -> LanguageLossConfig:
        """Return the loss that trainers compute."""
        return LanguageLossConfig(
            name=DISTIL,
            proximal="current",
            divergence=self.divergence,
            divergence_beta=self.divergence_beta,
            divergence_outside=self.divergence_outside,
        )


class DistillPlacement(SupervisedPlacement, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices of each role: a text such as ``"0-3"``, or a table with more."""

    inference: str | RolePlacement = ""


class DistillClusterConfig(
    SupervisedClusterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Numbers of workers of each role, and where they run."""

    placement: DistillPlacement = DistillPlacement()
    inference_workers: int = 1
    """workers that hold the teacher"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "inference_workers", least=1, most=MOST_WORKERS)


class DistillConfig(SupervisedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Distillation: what a teacher holds of given answers, token by token."""

    job: str = "distill"
    name: str = "distill"
    data: AnswersConfig
    teacher: ExamplesTeacherConfig
    actor: SftActorConfig = SftActorConfig()
    loss: DistillLossConfig = DistillLossConfig()
    cluster: DistillClusterConfig = DistillClusterConfig()

    @property
    def each(self) -> int:
        """Examples of a record."""
        return 1

    @property
    def loss_config(self) -> LanguageLossConfig:
        """The loss, and its coefficients."""
        return self.loss.loss()

    @property
    def max_tokens(self) -> int | None:
        """Tokens of one forward and backward pass, where that is how it is limited."""
        return self.actor.max_tokens

    @property
    def taught_by(self) -> ExamplesTeacherConfig:
        """Teacher that examples are compared with."""
        return self.teacher

    @property
    def inference_workers(self) -> int:
        """Number of workers that hold it."""
        return self.cluster.inference_workers

    @property
    def inference_placement(self) -> str | RolePlacement:
        """Their devices."""
        return self.cluster.placement.inference
