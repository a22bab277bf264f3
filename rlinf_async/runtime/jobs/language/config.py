"""The configuration of the ``language_rl`` job, section by section."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from rlinf_async.algorithms.config import (
    DISTIL,
    Aggregation,
    LanguageAdvantageConfig,
    LanguageLossConfig,
)
from rlinf_async.backends.base import OptimizerConfig, SchedulerConfig
from rlinf_async.backends.language_training.config import AdapterConfig, PublishedAdapterConfig
from rlinf_async.backends.megatron.config import MegatronOptions
from rlinf_async.backends.parts import (
    DEFAULT_ENGINE,
    DEFAULT_LANGUAGE_TRAINER,
    EnginePart,
    LanguageTrainerPart,
    engines,
    language_trainers,
)
from rlinf_async.backends.toy.config import ToyEngineConfig, ToyTrainerConfig
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.config import ConfigError
from rlinf_async.config.convert import convert
from rlinf_async.config.counts import MOST_WORKERS, check_bounds
from rlinf_async.config.registry import Part, Path, nearest
from rlinf_async.data import DataConfig
from rlinf_async.data.config import NO_VERIFIER
from rlinf_async.messages.language import Sampling
from rlinf_async.observe.evaluations import HELD_OUT
from rlinf_async.observe.samples import SamplesConfig
from rlinf_async.observe.sinks.config import ObserveConfig
from rlinf_async.parallel import Strategy
from rlinf_async.runtime.jobs.config import HostConfig
from rlinf_async.runtime.jobs.hooks import HooksConfig
from rlinf_async.runtime.jobs.placement import Preset, RolePlacement
from rlinf_async.runtime.recording import RecordingConfig
from rlinf_async.scheduling import SchedulingConfig
from rlinf_async.workers.episode.config import EpisodeConfig
from rlinf_async.workers.reward import RewardConfig
from rlinf_async.workers.rollout.language import LanguageRolloutConfig


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model to train: either ``path``, or ``config`` for random weights."""

    path: str = ""
    """folder of a Hugging Face checkpoint: config, tokenizer, weights"""
    config: dict[str, Any] = {}
    """a Hugging Face configuration with its ``model_type``; weights are then random"""
    tokenizer: str = ""
    """folder; the checkpoint's own when left out. ``arithmetic``: one token for each character"""

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.config):
            given = "both were" if self.path else "neither was"
            raise ValueError(
                "give either path (a Hugging Face folder) or config (a table with model_type): "
                f"{given} given"
            )
        if self.config and not self.tokenizer:
            raise ValueError(
                "a model that starts from a config needs a tokenizer: give its folder, or "
                "tokenizer = 'arithmetic'"
            )
        if self.config and "model_type" not in self.config:
            raise ValueError("config has no model_type; name an architecture, such as 'qwen3'")


def has_section(section: GenerationSettings | LearnerConfig) -> bool:
    """Whether the backend of a section is built in and has a section of its own there."""
    built_in = {*engines.paths, *language_trainers.paths}
    return section.backend in built_in and section.backend in section.__struct_fields__


def own_settings(section: GenerationSettings | LearnerConfig, part: Part) -> Any:
    """Return the settings of a section's backend, by its own ``Config``.

    Raises:
        ConfigError: ``options`` has what the backend does not know, or is of another one.
    """
    if has_section(section):
        if section.options:
            raise ConfigError(
                f"the settings of {section.backend!r} stand in the section {section.backend}: "
                "leave this out",
                path=("options",),
            )
        return getattr(section, section.backend)
    if part.Config is None:
        if section.options:
            raise ConfigError(
                f"{section.backend!r} has no settings of its own: leave it out", path=("options",)
            )
        return None
    return convert(section.options, part.Config, ("options",))


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine that generates, and how samples are drawn."""

    backend: str = DEFAULT_ENGINE
    """the engine's name; ``"file.py:Name"`` or ``"module:Name"``: one of your own"""
    sampling: Sampling = Sampling()
    serving: LanguageRolloutConfig = LanguageRolloutConfig()
    transformers: TransformersEngineConfig = TransformersEngineConfig()
    vllm: VllmEngineConfig = VllmEngineConfig()
    toy: ToyEngineConfig = ToyEngineConfig()
    options: dict[str, Any] = {}
    """settings of an engine that has no section here, by its own ``Config``"""

    def __post_init__(self) -> None:
        own_settings(self, self.part)

    @property
    def part(self) -> EnginePart:
        """Description of the engine."""
        return engines.check(self.backend, ("backend",))

    @property
    def where(self) -> Path:
        """Section of the engine's settings."""
        return ("rollout", self.backend if has_section(self) else "options")

    @property
    def engine(self) -> Any:
        """The engine's own settings."""
        return own_settings(self, self.part)

    def with_engine(self, settings: Any) -> GenerationSettings:
        """Return the same with other settings of the engine."""
        field = self.where[-1]
        given = settings if has_section(self) else msgspec.to_builtins(settings)
        return msgspec.structs.replace(self, **{field: given})


class LanguageOptimizerConfig(
    OptimizerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """AdamW, with the defaults of language models."""

    lr: float = 1e-6
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0


class LearnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that is trained, whatever it learns from."""

    backend: str = DEFAULT_LANGUAGE_TRAINER
    """the trainer's name; ``"file.py:Name"`` or ``"module:Name"``: one of your own"""
    tp: int = 1
    """actors that share each layer, with Megatron"""
    pp: int = 1
    """pipeline stages, which share the layers, with Megatron"""
    megatron: MegatronOptions = MegatronOptions()
    optimizer: LanguageOptimizerConfig = LanguageOptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    precision: Literal["float32", "bfloat16"] = "float32"
    strategy: Literal["fsdp2", "fsdp1"] = "fsdp2"
    activation_checkpointing: bool = False
    lora: AdapterConfig = AdapterConfig()
    micro_batch_size: int | None = None
    """samples of one forward and backward pass; when left out, ``max_tokens`` decides"""
    options: dict[str, Any] = {}
    """settings of a trainer that has no section here, by its own ``Config``"""

    def __post_init__(self) -> None:
        check_bounds(self, "tp", "pp", "micro_batch_size", least=1)
        part = self.part
        own_settings(self, part)
        if not part.actor:
            raise ConfigError(f"{self.backend!r} trains critics alone", path=("backend",))
        if self.lora.rank:
            part.check_adapter(self.strategy)
        if not part.cuts and self.model_ranks > 1:
            name = "tp" if self.tp > 1 else "pp"
            raise ConfigError(
                f"{name} is {getattr(self, name)}, but the backend {self.backend!r} does not cut a "
                f"model so: set actor.backend to {_parallel_trainers()}, or leave it out",
                path=(name,),
            )

    @property
    def part(self) -> LanguageTrainerPart:
        """Description of the trainer."""
        return language_trainers.check(self.backend, ("backend",))

    @property
    def trainer(self) -> Any:
        """The trainer's own settings."""
        return own_settings(self, self.part)

    @property
    def model_ranks(self) -> int:
        """Actors that hold one copy of the model together, and train on the same samples."""
        return self.tp * self.pp


def check_trainer_options(learner: LearnerConfig, *others: str) -> None:
    """Refuse settings of built-in trainers that say nothing, or belong to one that is not used.

    Args:
        learner: settings of the model that is trained.
        others: names of further trainers of the run, whose settings stand there too.
    """
    for name in language_trainers.paths.keys() & set(learner.__struct_fields__):
        instead = "" if name in (learner.backend, *others) else learner.backend
        part, options = language_trainers.load(name), getattr(learner, name)
        part.check_options(options, pp=learner.pp, instead=instead)


def _recipe(loss: LanguageLossConfig, *, divide_by_std: bool = True) -> ActorConfig:
    return ActorConfig(advantage=LanguageAdvantageConfig(divide_by_std=divide_by_std), loss=loss)


class ActorConfig(LearnerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The training of the policy."""

    advantage: LanguageAdvantageConfig = LanguageAdvantageConfig()
    loss: LanguageLossConfig = LanguageLossConfig()
    lora: PublishedAdapterConfig = PublishedAdapterConfig()
    recipe: str = ""
    """name of a published algorithm, whose settings take the place of the defaults of ``advantage``
    and ``loss``; see `recipes`"""
    pipelined: bool = True
    """train on the first complete micro-batch; False: collect the whole iteration first"""
    global_batches: int = 1
    """optimizer steps of one iteration, or of one epoch where there are several"""
    epochs: int = 1
    """passes over the samples of an iteration, shuffled from the second on"""
    max_tokens: int | None = None
    """tokens of one forward and backward pass, balanced; 16384 where neither is given"""
    balance_window: int | None = None
    """samples over which ``max_tokens`` balances; the global batch when left out, and training
    then begins when that is complete"""
    publish_precision: Literal["float32", "bfloat16", "float16"] = "float32"
    toy: ToyTrainerConfig = ToyTrainerConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "global_batches", "epochs", "max_tokens", "balance_window", least=1)

    @classmethod
    def base_of(cls, table: Mapping[str, object], base: object) -> object:
        """Return the settings of the recipe that a table names, for those that it leaves out."""
        name = table.get("recipe") or getattr(base, "recipe", "")
        if not isinstance(name, str) or not name:
            return base
        made = recipes().get(name)
        if made is None:
            raise ConfigError(
                f"there is no recipe {name!r}{nearest(name, recipes())}; there are: "
                f"{', '.join(recipes())}",
                path=("recipe",),
            )
        before = base if isinstance(base, ActorConfig) else ActorConfig()
        return msgspec.structs.replace(
            before, recipe=name, advantage=made.advantage, loss=made.loss
        )


@functools.cache
def recipes() -> dict[str, ActorConfig]:
    """Settings of published algorithms, by name.

    Sources: CISPO, MiniMax-M1 2025 (bounds as in TRL); DAPO, Yu et al. 2025; decoupled PPO, Hilton
    et al. 2022, as in AReaL (Fu et al. 2025); Dr. GRPO, Liu et al. 2025; GSPO, Zheng et al. 2025,
    section 5.1; SAPO, Gao et al. 2025.
    """
    loss = LanguageLossConfig
    each: Aggregation = "sequence-mean-token-mean"
    return {
        "cispo": _recipe(loss(name="cispo", clip_low=1.0, clip_high=4.0)),
        "dapo": _recipe(loss(clip_low=0.2, clip_high=0.28)),
        "decoupled_ppo": _recipe(loss(proximal="step", off_policy="decoupled", off_policy_cap=5.0)),
        "dr_grpo": _recipe(loss(aggregation="sequence-mean-token-sum"), divide_by_std=False),
        "gspo": _recipe(loss(name="gspo", clip_low=3e-4, clip_high=4e-4, aggregation=each)),
        "sapo": _recipe(loss(name="sapo", aggregation=each)),
    }


def _parallel_trainers() -> str:
    """The built-in trainers of actors of which several hold one copy of a model."""
    parts = {name: language_trainers.load(name) for name in language_trainers.paths}
    return " or ".join(repr(name) for name, one in parts.items() if one.cuts and one.actor)


class CriticOptimizerConfig(
    LanguageOptimizerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """AdamW with larger steps: the critic's head begins at 0."""

    lr: float = 1e-5


class CriticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The critics, ``cluster.critics`` of them; what is left out here is taken from ``[actor]``."""

    path: str = ""
    """folder of the model that it begins with; the actor's when left out"""
    backend: str | None = None
    """the actor's when left out"""
    tp: int | None = None
    """critics that share each layer, with Megatron; the actor's when left out"""
    pp: int | None = None
    """pipeline stages, which share the layers, with Megatron; the actor's when left out"""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    warmup_iterations: int = 0
    """iterations at the start in which only the critic is trained"""
    value_clip: float | None = None
    """largest difference between new and old values; None: no clipping"""
    micro_batch_size: int | None = None
    """samples of one forward and backward pass; the actor's, or its ``max_tokens``, when left
    out"""
    precision: Literal["float32", "bfloat16"] | None = None
    """the actor's when left out"""

    def __post_init__(self) -> None:
        check_bounds(self, "warmup_iterations", least=0)
        check_bounds(self, "tp", "pp", "micro_batch_size", least=1)
        if self.backend is not None:
            part = language_trainers.check(self.backend, ("backend",))
            if not (part.critic_trainer and part.has_weights):
                raise ConfigError(f"{self.backend!r} trains no critics", path=("backend",))
        check_bounds(self, "value_clip", above=0)


class TeacherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that samples are compared with, token by token; inference workers hold it."""

    path: str = ""
    """folder of its Hugging Face checkpoint, whose tokenizer is the model's; empty: there is none,
    or the policy is its own (``every``)"""
    every: int = 0
    """the teacher is the policy as it was at the newest version that is a multiple of this and not
    newer than the sample; 0: it is the model in ``path``"""
    top_k: int | Literal["all"] = 0
    """number of the teacher's most likely tokens of which it tells the log-probs at each token of a
    sample, or all; 0: only that of the token that was drawn"""

    def __post_init__(self) -> None:
        check_bounds(self, "every", least=0)
        if self.top_k != "all":
            check_bounds(self, "top_k", least=0)
        if self.every and self.path:
            raise ConfigError(
                f"every is {self.every}: the teacher is an earlier version of the policy, but path "
                f"names another one ({self.path!r}): leave one of them out",
                path=("every",),
            )
        if self.top_k and not (self.path or self.every):
            raise ConfigError(
                f"top_k is {self.top_k!r}, but there is no teacher: set path, or leave it out",
                path=("top_k",),
            )

    @property
    def named_by(self) -> str:
        """The setting that says who the teacher is."""
        return "every" if self.every else "path"


class WarmStartConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A short supervised phase before the first iteration; 0 steps: none."""

    steps: int = 0
    batch_size: int = 128
    lr: float = 3e-3
    warmup_steps: int = 20
    data: DataConfig | None = None
    """prompts and answers to imitate; the run's own when left out"""

    def __post_init__(self) -> None:
        check_bounds(self, "steps", "warmup_steps", least=0)
        check_bounds(self, "batch_size", least=1)
        check_bounds(self, "lr", above=0)


def check_export(training: Any) -> None:
    """Refuse settings of the folder of a model that is not written."""
    check_bounds(training, "export_shard_gb", above=0)
    defaults = {one.name: one.default for one in msgspec.structs.fields(training)}
    for name in ("export_precision", "export_shard_gb"):
        given = getattr(training, name)
        if not training.export and given != defaults[name]:
            raise ValueError(
                f"{name} is {given!r}, but export is false: no model is written; leave one of them "
                "out"
            )


class TrainingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length of the training, and sizes of its steps."""

    iterations: int
    prompts: int
    """prompts of one iteration, over all actors"""
    group_size: int = 8
    """samples of each prompt"""
    max_staleness: int = 0
    """versions that the weights which generated a token may be behind the trained ones; 0 is
    on-policy"""
    accept: str = ""
    """dynamic sampling: name of a rule for whole groups, ``varied`` or ``"mine.py:accept"``: one
    that it refuses is replaced by another prompt. Empty: every group is trained"""
    accept_part: str = ""
    """part of the reward (`Scored.parts`) that the rule sees, where the reward itself is shaped;
    empty: the reward"""
    max_extra: int | None = None
    """most groups of an iteration that are replaced; those beyond are trained as they are. None:
    four times ``prompts``"""
    check_weights_every: int = 0
    """versions between two comparisons of the engine's log-probs with the actor's; 0: only the
    first version, which is always compared"""
    check_weights_tolerance: float | None = None
    """largest difference of a log-prob with which the run goes on; when left out 0.001, and 0.2,
    in the mean over tokens, where anything is computed in less than float32"""
    checkpoint_every: int = 10
    """iterations between two checkpoints; one is always written at the end"""
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
        positive = ("iterations", "prompts", "group_size", "keep_checkpoints")
        check_bounds(self, *positive, least=1)
        check_bounds(self, "max_staleness", "check_weights_every", "checkpoint_every", least=0)
        check_bounds(self, "check_weights_tolerance", above=0)
        check_export(self)
        check_bounds(self, "max_extra", least=1)
        for name in ("accept_part", "max_extra"):
            if getattr(self, name) and not self.accept:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, but without accept every group is "
                    'trained: set accept, as in accept = "varied", or leave it out'
                )
        if self.accept == "varied" and self.group_size == 1:
            raise ValueError(
                "accept is 'varied', but the only sample of a group is like itself: set group_size "
                "to 2 or more"
            )

    @property
    def most_extra(self) -> int:
        """Most groups of an iteration that are replaced."""
        return 4 * self.prompts if self.max_extra is None else self.max_extra


SET_NAME = re.compile(r"[A-Za-z0-9_]+")


class EvaluationSetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts of other data than the run's own, which every evaluation asks, too."""

    data: DataConfig
    """file, folder or task, and its verifier, as in ``[data]``; its ``seed`` is not that of the
    run, so that all runs are asked the same"""
    prompts: int = 0
    """most prompts: the first ones in the order of ``data``; 0: all"""
    samples: int = 1
    """answers to each prompt"""
    temperature: float = 0.0
    """divisor of the logits; 0: the most likely tokens (greedy)"""
    top_k: int = 0
    """number of most likely tokens to draw from; 0: all"""
    top_p: float = 1.0
    """probability mass of the most likely tokens to draw from; 1: all"""
    min_p: float = 0.0
    """smallest probability of a token to draw from, as a share of that of the most likely one; 0:
    none"""
    repetition_penalty: float = 1.0
    """divisor of the positive logits, and factor of the others, of tokens that stand in the prompt
    or in the answer so far; 1: off"""
    max_tokens: int | None = None
    """limit of an answer; that of ``rollout.sampling`` when left out"""

    def __post_init__(self) -> None:
        check_bounds(self, "prompts", least=0)
        check_bounds(self, "samples", "max_tokens", least=1)
        if self.temperature == 0.0:
            for name, value in (("samples", 1), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
                if getattr(self, name) != value:
                    raise ValueError(
                        f"{name} is {getattr(self, name)}, but at temperature 0 the most likely "
                        "token is taken, and all answers to a prompt are equal: set temperature, "
                        "or leave it out"
                    )
        self.sampling(Sampling())
        if self.data.verifier == NO_VERIFIER:
            raise ConfigError(
                f"no answer is right or wrong with {NO_VERIFIER!r}: give a verifier",
                path=("data", "verifier"),
            )
        for name in ("held_out", "epochs"):
            if getattr(self.data, name):
                raise ConfigError(
                    f"{name} is {getattr(self.data, name)}, but all prompts of a set are for "
                    "evaluation, and each is asked once: leave it out (prompts limits them)",
                    path=("data", name),
                )

    def sampling(self, training: Sampling) -> Sampling:
        """Return how its answers are drawn, where samples to train on are drawn by ``training``:
        with the same biases and stops."""
        return msgspec.structs.replace(
            training,
            max_tokens=self.max_tokens or training.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            routing_replay=False,
        )


class EvaluationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Greedy answers to held-out prompts (``data.held_out``), and those to the prompts of ``sets``,
    before the first iteration and after the last."""

    samples: int = 200
    """most held-out prompts of an evaluation; 0: none"""
    sets: dict[str, EvaluationSetConfig] = {}
    """further prompts, by a name for their columns"""
    every: int = 0
    """iterations between two evaluations before the last one, 0: none; each goes on beside the
    training of the next iteration, whose weights are published once it is complete"""
    target_accuracy: float | None = None
    """share of right answers with which the run succeeds, where every reward is 0 or 1; None: there
    is no target"""
    target_reward: float | None = None
    """mean reward with which the run succeeds, whatever the rewards are; None: there is no
    target"""

    def __post_init__(self) -> None:
        check_bounds(self, "samples", "every", least=0)
        if self.every and not (self.samples or self.sets):
            raise ValueError(
                f"every is {self.every}, but samples is 0: nothing would be evaluated; leave one "
                "of them out"
            )
        for name in self.sets:
            if name == HELD_OUT or not SET_NAME.fullmatch(name):
                why = "that is the set of data.held_out" if name == HELD_OUT else "it names columns"
                raise ConfigError(
                    f"{name!r} cannot name a set: {why}; use letters, digits and _, as in "
                    "[evaluation.sets.math]",
                    path=("sets", name),
                )
        if self.target_accuracy is not None and not 0.0 <= self.target_accuracy <= 1.0:
            raise ValueError(
                f"target_accuracy is {self.target_accuracy}; it must lie between 0 and 1, or be "
                "left out"
            )
        if self.target_reward is not None and not math.isfinite(self.target_reward):
            raise ValueError(
                f"target_reward is {self.target_reward}; it must be a finite number, or be left out"
            )

    @property
    def has_target(self) -> bool:
        """Whether the run can succeed or fall short."""
        return self.target_accuracy is not None or self.target_reward is not None


class LanguagePlacement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices of each role: a text such as ``"0-3"``, or a table with more."""

    preset: Preset = "auto"
    """placement of roles that are left out; ``hybrid``: rollout has its own, the others share"""
    actor: str | RolePlacement = ""
    critic: str | RolePlacement = ""
    inference: str | RolePlacement = ""
    rollout: str | RolePlacement = ""
    reward: str | RolePlacement = ""
    """devices of reward workers; none when left out, whatever the preset"""
    episode: str | RolePlacement = ""
    """the same of episode workers"""


class ClusterConfig(HostConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers of workers of each role, and where they run."""

    placement: Preset | LanguagePlacement = "auto"
    """rollout workers and learners that share devices take turns, with offload and onload"""
    rollout_workers: int | None = None
    """number of rollout workers; when left out as many as their devices allow, 1 without
    accelerators"""
    reward_workers: int = 1
    episode_workers: int = 0
    """workers that run the coroutines of ``[episode]``: at least 1 with ``episode.run``, else 0"""
    inference_workers: int = 0
    """workers that recompute log-probs by the actor's forward, and ask the teacher; 0: the sampled
    ones are used"""
    actors: int | None = None
    """number of actors; when left out as many as their devices and the batch sizes allow, 1 without
    accelerators"""
    critics: int = 0
    """workers that compute values, for ``gae``: as many as actors, or 0; with Megatron as many as
    hold a model together for each actor that reads samples"""
    deadlock_after: float | None = 60.0
    """seconds without any movement after which a deadlock ends the run"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_roles(self.placement)
        names = ("reward_workers", "rollout_workers", "actors")
        check_bounds(self, *names, least=1, most=MOST_WORKERS)
        names = ("inference_workers", "critics", "episode_workers")
        check_bounds(self, *names, least=0, most=MOST_WORKERS)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every worker's process."""
        return super().environment | {
            "TOKENIZERS_PARALLELISM": "false",  # it would warn of every fork
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # the run shows its own
        }


MAY_DIFFER = (
    "actor.backend",
    "actor.tp",
    "actor.pp",
    "actor.megatron",
    "name",
    "model.path",
    "teacher.path",
    "data.path",
    "data.verifier",
    "data.verifier_column",
    "training.iterations",
    "training.check_weights_every",
    "training.check_weights_tolerance",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.export",
    "training.export_precision",
    "training.export_shard_gb",
    "samples",
    "recording",
    "hooks",
    "observe",
    "episode.seconds",
    "episode.concurrent",
    "episode.endpoint",
    "episode.sticky",
    "rollout.serving",
    "rollout.transformers",
    "rollout.vllm",
    "rollout.toy",
    "reward",
    "actor.pipelined",
    "actor.micro_batch_size",
    "actor.max_tokens",
    "actor.balance_window",
    "actor.activation_checkpointing",
    "actor.publish_precision",
    "actor.lora.publish",
    "training.accept",
    "training.accept_part",
    "training.max_extra",
    "actor.recipe",
    "actor.loss.proximal",
    "actor.loss.off_policy",
    "actor.loss.off_policy_cap",
    "actor.loss.off_policy_floor",
    "actor.loss.off_policy_geometric",
    "actor.loss.off_policy_product",
    "actor.loss.off_policy_veto",
    "actor.toy",
    "critic.path",
    "critic.backend",
    "critic.tp",
    "critic.pp",
    "critic.micro_batch_size",
    "warm_start",
    "evaluation",
    "scheduler",
    "cluster",
)
"""settings and sections that a resumed run may change"""


class LanguageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reinforcement learning of a language model on verifiable tasks."""

    MOVED: ClassVar[Mapping[str, str]] = {"training.metrics": "observe.sinks"}

    job: str = "language_rl"
    name: str = "language"
    """name of the run, in reports and in the default run folder"""
    seed: int = 0
    """seed of everything; ``data.seed`` is added to it"""
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    rollout: GenerationSettings = GenerationSettings()
    episode: EpisodeConfig = EpisodeConfig()
    reward: RewardConfig = RewardConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    teacher: TeacherConfig = TeacherConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    scheduler: SchedulingConfig = SchedulingConfig()
    samples: SamplesConfig = SamplesConfig()
    recording: RecordingConfig = RecordingConfig()
    hooks: HooksConfig = HooksConfig()
    observe: ObserveConfig = ObserveConfig()
    cluster: ClusterConfig = ClusterConfig()

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"{self.seed} is below 0: seeds count from 0", path=("seed",))
        check_trainer_options(self.actor, self.critic_backend)
        if self.critic.warmup_iterations >= self.training.iterations:
            raise ConfigError(
                f"with {self.critic.warmup_iterations} of {self.training.iterations} iterations "
                "for the critic alone the actor would never train: set it to less than "
                "training.iterations",
                path=("critic", "warmup_iterations"),
            )
        for name in ("tp", "pp"):
            size = getattr(self.critic, name)
            if size is not None and size > 1 and not self.critic_part.cuts:
                raise ConfigError(
                    f"{name} is {size}, but the backend {self.critic_backend!r} does not cut a "
                    f"critic so: set critic.backend to {_parallel_trainers()}, or leave it out",
                    path=("critic", name),
                )

    @property
    def iteration_samples(self) -> int:
        """Samples of one iteration, over all actors."""
        return self.training.prompts * self.training.group_size

    @property
    def needs_reference(self) -> bool:
        """Whether the loss or the advantage has a KL to the first weights."""
        return self.actor.loss.kl_coefficient > 0.0 or self.actor.advantage.kl_coefficient > 0.0

    @property
    def needs_previous(self) -> bool:
        """Whether the loss or the advantage uses log-probs that inference workers recompute. One
        that learns from a teacher alone does without: then they hold no other model."""
        actor = self.actor
        if self.distils:
            return False
        return actor.loss.proximal == "auto" or actor.advantage.kl_coefficient > 0.0

    @property
    def distils(self) -> bool:
        """Whether the policy learns from its teacher alone, and not from rewards."""
        return self.actor.loss.name == DISTIL

    @property
    def needs_teacher(self) -> bool:
        """Whether samples are compared with a teacher."""
        return bool(self.teacher.path) or self.teacher.every > 0

    @property
    def needs_inference(self) -> bool:
        """Whether samples pass through inference workers before they are scored."""
        return self.cluster.inference_workers > 0

    @property
    def rounded(self) -> bool:
        """Whether engine, actor or what is published between them is less than float32: log-probs
        of single tokens differ by tenths then, logits of 20 being an eighth apart in bfloat16."""
        rollout, actor = self.rollout, self.actor
        if not rollout.part.has_weights:
            return False
        engine = rollout.part.precision(rollout.engine)
        return {actor.precision, actor.publish_precision, engine} != {"float32"}

    @property
    def publishes_adapter(self) -> bool:
        """Whether engines are given an adapter alone, not whole weights."""
        return self.actor.lora.publish == "adapter"

    @property
    def weights_tolerance(self) -> float:
        """Largest difference between log-probs of engine and actor; of the mean if `rounded`."""
        stated = self.training.check_weights_tolerance
        if stated is not None:
            return stated
        return 0.2 if self.rounded else 1e-3

    @property
    def has_episodes(self) -> bool:
        """Whether a sample is an episode, which may have several turns."""
        return bool(self.episode.run)

    @property
    def sticky(self) -> bool:
        """Whether a turn goes to the rollout worker that drew the one before, if it has room."""
        return self.has_episodes and self.episode.sticky and self.rollout_ranks > 1

    @property
    def has_critic(self) -> bool:
        """Whether sample groups pass through critics before the actors."""
        return self.cluster.critics > 0

    @property
    def actors(self) -> int:
        """Number of actors."""
        return self.cluster.actors or self.actor.model_ranks

    @property
    def scheduled(self) -> bool:
        """Whether devices move between rollout workers and actors."""
        return self.scheduler.policy != "static"

    @property
    def data_ranks(self) -> int:
        """Number of actors, or of groups of actors, that train on samples of their own."""
        return self.actors // self.actor.model_ranks

    @property
    def actor_parts(self) -> Strategy:
        """Strategy by which each copy of the policy is cut."""
        actor = self.actor
        return actor.part.strategy(actor.tp, actor.pp, actor.trainer)

    @property
    def critic_backend(self) -> str:
        """Name of the trainer of the critics."""
        actor = self.actor
        return actor.backend if not actor.part.has_weights else self.critic.backend or actor.backend

    @property
    def critic_part(self) -> LanguageTrainerPart:
        """Description of the critic's trainer."""
        return language_trainers.check(self.critic_backend, ("critic", "backend"))

    @property
    def critic_trainer(self) -> Any:
        """The settings of that trainer, which stand in ``[actor]``."""
        actor = self.actor
        options = actor.trainer
        if self.critic_backend != actor.backend:
            options = getattr(actor, self.critic_backend, None)
        same = self.critic_pp == actor.pp
        return self.critic_part.critic_options(options, same_stages=same)

    @property
    def critic_parts(self) -> Strategy:
        """Strategy by which each copy of the critic is cut."""
        if not self.critic_part.cuts:
            return Strategy()
        return self.critic_part.strategy(self.critic_tp, self.critic_pp, self.critic_trainer)

    @property
    def critic_tp(self) -> int:
        """Critics that share each layer."""
        return self.critic.tp or self.actor.tp

    @property
    def critic_pp(self) -> int:
        """Pipeline stages of a critic."""
        return self.critic.pp or self.actor.pp

    @property
    def critics_needed(self) -> int:
        """Number of critics that can be paired with the actors."""
        return self.data_ranks * self.critic_parts.world_size

    @property
    def rollout_workers(self) -> int:
        """Number of rollout workers with devices of their own."""
        return self.cluster.rollout_workers or 1

    @property
    def rollout_ranks(self) -> int:
        """Number of rollout workers, with those on devices that the actors lend."""
        return self.rollout_workers + self.scheduler.guests

    @property
    def placement(self) -> LanguagePlacement:
        """The settings of the devices of each role."""
        given = self.cluster.placement
        return LanguagePlacement(preset=given) if isinstance(given, str) else given

    def fits_actors(self, count: int) -> bool:
        """Whether prompts, batches and examples can be divided among ``count`` actors."""
        count, left = divmod(count, self.actor.model_ranks)
        if left:
            return False
        groups, left = divmod(self.training.prompts, count)
        if left or groups % self.actor.global_batches:
            return False
        samples = groups * self.training.group_size // self.actor.global_batches
        if samples % (self.actor.micro_batch_size or 1):
            return False
        return not self.warm_start.steps or self.warm_start.batch_size % count == 0
