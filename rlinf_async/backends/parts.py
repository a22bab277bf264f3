"""What engines and trainers say about themselves, and where they are found. No torch.

::

    engines, language_trainers, trainers, off_policy_trainers, policy_backends
        .load("name")                    the part
        .load("name").make(settings, ...)    the engine or trainer itself

A job asks the part whatever depends on the library behind it: what it refuses, which devices it
takes, its own configuration. docs/parts.md has an engine and a trainer of one's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple

import msgspec

from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.base import (
    OffPolicyTrainer,
    OptimizerConfig,
    PolicyBackend,
    SchedulerConfig,
    TrainerBackend,
)
from rlinf_async.backends.language import GenerationEngine, LanguageTrainer, check_family
from rlinf_async.backends.language_training.config import (
    SHARD_BYTES,
    LanguageModelConfig,
    PublishedAdapterConfig,
)
from rlinf_async.config.registry import ConfigError, Part, Registry
from rlinf_async.config.registry import Path as Setting
from rlinf_async.messages.language import Sampling
from rlinf_async.parallel import Strategy

LANGUAGE_IMPORTS: Final = (
    "torch._dynamo",  # an optimizer's first step imports it
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
)
"""modules that whatever computes with a language model imports sooner or later"""

PRECISIONS = Literal["float32", "bfloat16"]


class EngineRun(NamedTuple):
    """Facts about a run that its engine needs."""

    settings: Any
    """the engine's own"""
    where: Setting
    """section of the settings"""
    sampling: Sampling
    model: Mapping[str, Any]
    """content of the model's ``config.json``; empty where it is not there yet"""
    model_at: Setting
    """setting that names the model"""


class EngineDevices(NamedTuple):
    """Devices of a rollout worker."""

    number: int
    """devices of each worker"""
    accelerated: bool
    """whether they are accelerators"""
    others: bool
    """whether the machine has accelerators, be it of other roles"""
    share: float
    """share of each device's memory, between 0 and 1"""
    lent: bool
    """whether other roles use them in turns"""


class EnginePart(Part):
    """An engine that generates."""

    has_weights: ClassVar[bool] = True
    """whether the engine has weights; else it makes tokens up, as a cost model does, and is
    compared with no trainer"""
    one_device: ClassVar[bool] = False
    """whether each worker takes at most one device"""
    sees_images: ClassVar[bool] = False
    """whether it reads the images of prompts (`Prompt.images`)"""
    exact: ClassVar[bool] = False
    """whether its log-probs in float32 are the trainer's, up to the last bits"""
    honours: ClassVar[frozenset[str]] = frozenset()
    """names of the settings of `Sampling` that it honours, of those that not every engine has to
    (`Sampling.further`)"""

    def with_model(self, settings: Any, folder: Path) -> Any:
        """Return the settings with the model's folder in ``model``, if they have that field."""
        if isinstance(settings, msgspec.Struct) and "model" in settings.__struct_fields__:
            return msgspec.structs.replace(settings, model=str(folder))
        return settings

    def with_own_weights(self, settings: Any, where: Setting) -> Any:
        """Return the settings under which the engine serves the weights in the model's folder, as
        version 0, and waits for no update.

        Raises `ConfigError` where it cannot.
        """
        if isinstance(settings, msgspec.Struct) and "weights" in settings.__struct_fields__:
            return msgspec.structs.replace(settings, weights="folder")
        raise ConfigError(
            "this engine loads no weights from a model's folder (it has no setting weights = "
            "'folder'): evaluate with another rollout.backend",
            path=where,
        )

    def placed(self, settings: Any, devices: EngineDevices, where: Setting) -> Any:
        """Return the settings as the devices of the run complete them.

        Raises `ConfigError` where they contradict each other.
        """
        return settings

    def with_adapter(self, settings: Any, rank: int) -> Any:
        """Return the settings with which it serves the model of its folder under an adapter (LoRA)
        that is published alone.

        Args:
            settings: the engine's own, placed.
            rank: the adapter's.

        Raises `ConfigError` where it cannot.
        """
        raise ConfigError(
            "this engine takes whole weights alone: set it to 'merged' (tensors without an adapter "
            "are not sent again), or use another engine by rollout.backend",
            path=("actor", "lora", "publish"),
        )

    def with_formats(self, settings: Any) -> Any:
        """Return the settings with which responses may have a format (`Sampling.grammar`): these,
        where it can always do so."""
        return settings

    def keeps_memory(self, settings: Any) -> str:
        """Return the setting that keeps it from freeing its devices' memory; empty: none does."""
        return ""

    def precision(self, settings: Any) -> str:
        """Return what it computes in: ``"float32"``, or anything less."""
        return str(getattr(settings, "dtype", "float32"))

    def context(self, settings: Any, model: Mapping[str, Any]) -> int | None:
        """Return the most tokens of a prompt with its response; None: there is no limit.

        Args:
            settings: the engine's own.
            model: content of the text model's ``config.json``.
        """
        limits = (model.get("max_position_embeddings"), getattr(settings, "context", None))
        return min((one for one in limits if one), default=None)

    def check(self, run: EngineRun) -> None:
        """Refuse what can be refused without its library and before anything is read.

        Raises:
            ConfigError: names the setting.
            UnsupportedModel: it does not serve this model.
        """
        if run.model and self.has_weights:
            check_family(run.model)

    def inspect(self, settings: Any, folder: Path, device: str) -> None:
        """Refuse what it would refuse when it starts; may import its library.

        Args:
            settings: the engine's own, placed.
            folder: folder with the model's configuration and tokenizer, perhaps without weights.
            device: ``"cpu"`` or a CUDA device.

        Raises `ValueError`.
        """

    def make(self, settings: Any, seed: int, device: str, /) -> GenerationEngine:
        """Make the engine. Cheap: `GenerationEngine.start` builds.

        Args:
            settings: the engine's own, with the model's folder.
            seed: seed of random numbers that a request's own seed does not set.
            device: torch's name of it.
        """
        made: GenerationEngine = self.by_factory(settings, seed, device)
        return made


class Learner(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is trained, in whichever backend."""

    model: LanguageModelConfig
    device: str
    """torch's name, of each rank's process"""
    precision: PRECISIONS = "float32"
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6, eps=1e-8, max_grad_norm=1.0)
    scheduler: SchedulerConfig = SchedulerConfig()
    loss: LanguageLossConfig = LanguageLossConfig()
    advantage: LanguageAdvantageConfig = LanguageAdvantageConfig()
    value_clip: float | None = None
    reference: bool = False
    engine_tolerance: float | None = None
    routing_replay: bool = False
    publish_precision: Literal["float32", "bfloat16", "float16"] = "float32"
    lora: PublishedAdapterConfig = PublishedAdapterConfig()
    export_precision: PRECISIONS = "float32"
    export_shard_bytes: int = SHARD_BYTES
    seed: int = 0
    strategy: Literal["fsdp2", "fsdp1"] = "fsdp2"
    """how parameters are sharded over data ranks"""
    tp: int = 1
    pp: int = 1
    options: Any = None
    """the trainer's own settings"""

    def training(self) -> dict[str, Any]:
        """Return the fields of a `LanguageTrainingConfig`."""
        names = (
            *("advantage", "loss", "value_clip", "reference", "publish_precision", "seed"),
            *("engine_tolerance", "lora", "export_precision", "export_shard_bytes"),
            "routing_replay",
        )
        return {name: getattr(self, name) for name in names}


class TrainerRun(NamedTuple):
    """Facts about a run that its trainer needs."""

    role: Literal["actor", "critic"]
    model: Mapping[str, Any]
    """content of the model's ``config.json``; empty where it is not there yet"""
    model_at: Setting
    """setting that names the model"""
    parts: Strategy
    """how each copy of the model is cut"""
    options: Any
    """the trainer's own settings"""


class LanguageTrainerPart(Part):
    """A trainer of a language model."""

    has_weights: ClassVar[bool] = True
    """whether the trainer has weights; else it is a cost model"""
    collective: ClassVar[bool] = True
    """whether its ranks need torch.distributed"""
    cuts: ClassVar[bool] = False
    """whether several ranks hold one copy of a model (``tp``, ``pp``)"""
    sees_every_gpu: ClassVar[bool] = False
    """whether it computes on any GPU that its process sees, though it was given none"""
    actor: ClassVar[str] = "rlinf_async.workers.actor:LanguageActor"
    """import path of the worker that trains a policy; empty: it trains critics alone"""
    critic: ClassVar[str] = "rlinf_async.workers.critic:LanguageCritic"
    """import path of the worker that trains a critic"""
    critic_trainer: ClassVar[str] = ""
    """name of its trainer of critics; empty: it has none"""
    inference: ClassVar[str] = ""
    """name of the trainer by which one device computes log-probs; empty: this one"""
    sees_images: ClassVar[bool] = False
    """whether it reads the images of samples (`TrainingSample.images`)"""
    tells_distributions: ClassVar[bool] = False
    """whether it trains on log-probs of tokens that were not drawn (``PackedTokens.asked``), and,
    where inference workers compute by it, tells them as `TellsDistributions` does"""
    honours: ClassVar[frozenset[str]] = frozenset()
    """names of the settings of `Sampling` that its forward pass takes from each sample, beside
    temperature and what was kept"""

    def config(self, learner: Learner) -> Any:
        """Return the configuration with which `make` is called."""
        return learner

    def strategy(self, tp: int, pp: int, options: Any) -> Strategy:
        """Return how each copy of a model is cut."""
        return Strategy(tp=tp, pp=pp)

    def critic_options(self, options: Any, *, same_stages: bool) -> Any:
        """Return a critic's own settings, from those of the actor.

        Args:
            options: options of the actor.
            same_stages: whether both have as many pipeline stages.
        """
        return options

    def can_offload(self, learner_strategy: str) -> bool:
        """Return whether several ranks on GPUs free their devices' memory."""
        return True

    def check(self, run: TrainerRun) -> None:
        """Refuse what can be refused without a worker.

        Raises `ConfigError`, which names the setting.
        """

    def check_options(self, options: Any, *, pp: int, instead: str) -> None:
        """Refuse settings of its own that say nothing, or contradict others.

        Args:
            options: the trainer's own settings.
            pp: ``actor.pp``.
            instead: name of the trainer that was chosen; empty: it is this one.

        Raises `ConfigError`.
        """

    def check_adapter(self, learner_strategy: str) -> None:
        """Refuse to train a low-rank adapter, where it cannot.

        Args:
            learner_strategy: ``actor.strategy``.

        Raises `ConfigError`.
        """
        raise ConfigError(
            "this backend trains all weights of a model, no adapter (LoRA): set actor.backend to "
            f"{DEFAULT_LANGUAGE_TRAINER!r}, or leave it out",
            path=("lora", "rank"),
        )

    def check_scheduled(self, learner_strategy: str, options: Any, wanted: str) -> None:
        """Refuse settings with which ranks cannot change while they train.

        Args:
            learner_strategy: ``actor.strategy``.
            options: the trainer's own settings.
            wanted: beginning of the remedy: what to set to have no scheduler, and "or".

        Raises `ConfigError`.
        """

    def make(self, config: Any, world_size: int, rank: int, /) -> LanguageTrainer:
        """Build one rank's trainer."""
        made: LanguageTrainer = self.by_factory(config, world_size, rank)
        return made


class TrainerPart(Part):
    """A trainer of an embodied policy."""

    collective: ClassVar[bool] = True
    """whether its ranks need torch.distributed"""

    def make(self, config: Any, world_size: int, rank: int, /) -> TrainerBackend:
        """Build one rank's trainer."""
        made: TrainerBackend = self.by_factory(config, world_size, rank)
        return made


class OffPolicyTrainerPart(Part):
    """A trainer that learns from replay, for a policy of known spaces."""

    collective: ClassVar[bool] = True
    """whether its ranks need torch.distributed"""

    def make(self, config: Any, policy: Any, world_size: int, rank: int, /) -> OffPolicyTrainer:
        """Build one rank's trainer."""
        made: OffPolicyTrainer = self.by_factory(config, policy, world_size, rank)
        return made


class PolicyPart(Part):
    """A policy that acts."""

    def make(self, config: Any, seed: int, device: str, /) -> PolicyBackend:
        """Build the policy."""
        made: PolicyBackend = self.by_factory(config, seed, device)
        return made


ONE_RANK = ("config", "world_size", "rank")

engines: Registry[EnginePart] = Registry(
    "generation backend",
    entries={
        "toy": "rlinf_async.backends.toy.part:ToyEnginePart",
        "transformers": "rlinf_async.backends.transformers.part:Transformers",
        "vllm": "rlinf_async.backends.vllm.part:Vllm",
    },
    group="rlinf_async.engines",
    called_with=("config", "seed", "device"),
    described_by=EnginePart,
)
DEFAULT_ENGINE: Final = "transformers"

language_trainers: Registry[LanguageTrainerPart] = Registry(
    "language trainer backend",
    entries={
        "toy": "rlinf_async.backends.toy.part:ToyTrainerPart",
        "fsdp": "rlinf_async.backends.fsdp.language.part:FSDP",
        "fsdp_critic": "rlinf_async.backends.fsdp.language.part:FSDPCriticPart",
        "megatron": "rlinf_async.backends.megatron.part:Megatron",
        "megatron_critic": "rlinf_async.backends.megatron.part:MegatronCriticPart",
    },
    group="rlinf_async.language_trainers",
    called_with=ONE_RANK,
    described_by=LanguageTrainerPart,
)
DEFAULT_LANGUAGE_TRAINER: Final = "fsdp"

trainers: Registry[TrainerPart] = Registry(
    "trainer backend",
    entries={"fsdp": "rlinf_async.backends.fsdp.part:Embodied"},
    group="rlinf_async.trainers",
    called_with=ONE_RANK,
    described_by=TrainerPart,
)
DEFAULT_TRAINER: Final = "fsdp"

off_policy_trainers: Registry[OffPolicyTrainerPart] = Registry(
    "off-policy trainer backend",
    entries={
        "sac": "rlinf_async.backends.fsdp.part:SoftActorCritic",
        "offline": "rlinf_async.backends.fsdp.part:FromData",
    },
    group="rlinf_async.off_policy_trainers",
    called_with=("config", "policy", "world_size", "rank"),
    described_by=OffPolicyTrainerPart,
)
DEFAULT_OFF_POLICY_TRAINER: Final = "sac"

policy_backends: Registry[PolicyPart] = Registry(
    "policy backend",
    entries={"torch": "rlinf_async.backends.policies.part:TorchPolicy"},
    group="rlinf_async.policy_backends",
    called_with=("config", "seed", "device"),
    described_by=PolicyPart,
)
DEFAULT_POLICY_BACKEND: Final = "torch"
