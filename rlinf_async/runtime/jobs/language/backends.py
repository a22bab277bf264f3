"""What trains: for each backend its actor, its critic, and the configuration of their trainers.

::

    [actor], [critic], [warm_start] --Learner--> Backend.trainer --> the trainer's own configuration
                                                 Backend.actor, Backend.critic: the workers
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from rlinf_async.algorithms.language.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from rlinf_async.backends.optimizer_config import OptimizerConfig, SchedulerConfig
from rlinf_async.backends.toy.config import ToyPolicyConfig
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.folder import has_weights
from rlinf_async.runtime.jobs.language.sections import MegatronOptions
from rlinf_async.workers.actor import FSDPActor, LanguageActor, MegatronActor
from rlinf_async.workers.critic import FSDPCritic, LanguageCritic, MegatronCritic


class Learner(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is trained, in whichever backend."""

    model: LanguageModelConfig
    device: str
    precision: Literal["float32", "bfloat16"]
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    loss: LanguageLossConfig
    advantage: LanguageAdvantageConfig = LanguageAdvantageConfig()
    value_clip: float | None = None
    reference: bool = False
    engine_tolerance: float | None = None
    publish_precision: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int
    strategy: Literal["fsdp2", "fsdp1"] = "fsdp2"
    """of FSDP"""
    tp: int = 1
    pp: int = 1
    megatron: MegatronOptions = MegatronOptions()


class Backend(NamedTuple):
    """The workers of a backend, and their trainers."""

    actor: type[LanguageActor]
    critic: type[LanguageCritic]
    actor_trainer: str
    """registered name"""
    critic_trainer: str
    trainer: Callable[[Learner], Any]


def _fsdp(one: Learner) -> LanguageTrainerConfig:
    return LanguageTrainerConfig(
        fsdp=LanguageFSDPConfig(
            model=one.model,
            device=one.device,
            precision=one.precision,
            strategy=one.strategy,
            optimizer=one.optimizer,
            scheduler=one.scheduler,
        ),
        **_common(one),
    )


def _megatron(one: Learner) -> MegatronTrainerConfig:
    return MegatronTrainerConfig(
        megatron=MegatronConfig(
            model=one.model,
            device=one.device,
            precision=one.precision,
            optimizer=one.optimizer,
            scheduler=one.scheduler,
            tp=one.tp,
            pp=one.pp,
            **msgspec.structs.asdict(one.megatron),
        ),
        **_common(one),
    )


def _common(one: Learner) -> dict[str, Any]:
    names = (
        *("advantage", "loss", "value_clip", "reference", "publish_precision", "seed"),
        "engine_tolerance",
    )
    return {name: getattr(one, name) for name in names}


def _toy(_: Learner) -> Any:
    raise AssertionError("a toy's configuration is [actor.toy]")


BACKENDS = {
    "fsdp": Backend(FSDPActor, FSDPCritic, "fsdp", "fsdp_critic", _fsdp),
    "megatron": Backend(MegatronActor, MegatronCritic, "megatron", "megatron_critic", _megatron),
    "toy": Backend(LanguageActor, LanguageCritic, "toy", "toy", _toy),
}
"""``actor.backend``, ``critic.backend`` -> what trains"""


def actor_config(config: LanguageConfig, model: Path, device: str) -> Any:
    """The actors' trainer's own configuration; ``device`` is that of each, in its process."""
    return _policy(config, model, device, config.actor.backend)


def inference_backend(config: LanguageConfig) -> str:
    """The trainer that inference workers compute log-probs with: one device has the whole model."""
    return "toy" if config.actor.backend == "toy" else "fsdp"


def inference_config(config: LanguageConfig, model: Path, device: str) -> Any:
    """The inference workers' trainer's own configuration."""
    return _policy(config, model, device, inference_backend(config))


def critic_config(config: LanguageConfig, model: Path, device: str) -> Any:
    """The critics' trainer's own configuration: the actor's, but for what ``[critic]`` says."""
    actor, critic = config.actor, config.critic
    if config.critic_backend == "toy":
        return actor.toy
    folder = Path(critic.path).expanduser() if critic.path else model
    learner = Learner(
        model=_described(config, folder),
        device=device,
        precision=critic.precision or actor.precision,
        optimizer=critic.optimizer,
        scheduler=critic.scheduler,
        advantage=actor.advantage,
        loss=LanguageLossConfig(aggregation=actor.loss.aggregation),
        value_clip=critic.value_clip,
        seed=config.seed,
        strategy=actor.strategy,
        tp=config.critic_tp,
        pp=config.critic_pp,
        megatron=config.critic_megatron,
    )
    return BACKENDS[config.critic_backend].trainer(learner)


def supervised_config(config: LanguageConfig, model: Path, device: str) -> Any:
    """The trainer's own configuration of a warm start, by the actors' backend."""
    phase, actor = config.warm_start, config.actor
    learner = Learner(
        model=_described(config, model, checkpointing=False),
        device=device,
        precision=actor.precision,
        optimizer=OptimizerConfig(lr=phase.lr, eps=1e-8, max_grad_norm=1.0),
        scheduler=SchedulerConfig(
            kind="cosine",
            warmup_steps=min(phase.warmup_steps, phase.steps - 1),
            total_steps=phase.steps,
            min_factor=0.1,
        ),
        loss=LanguageLossConfig(name="supervised"),
        seed=config.seed,
        strategy=actor.strategy,
        tp=actor.tp,
        pp=actor.pp,
        megatron=actor.megatron,
    )
    return BACKENDS[actor.backend].trainer(learner)


def _policy(config: LanguageConfig, model: Path, device: str, backend: str) -> Any:
    actor = config.actor
    if backend == "toy":
        return ToyPolicyConfig(loss=actor.loss, **msgspec.structs.asdict(actor.toy))
    learner = Learner(
        model=_described(config, model),
        device=device,
        precision=actor.precision,
        optimizer=actor.optimizer,
        scheduler=actor.scheduler,
        advantage=actor.advantage,
        loss=actor.loss,
        reference=config.needs_reference,
        engine_tolerance=config.weights_tolerance,
        publish_precision=actor.publish_precision,
        seed=config.seed,
        strategy=actor.strategy,
        tp=actor.tp,
        pp=actor.pp,
        megatron=actor.megatron,
    )
    return BACKENDS[backend].trainer(learner)


def _described(
    config: LanguageConfig, folder: Path, *, checkpointing: bool = True
) -> LanguageModelConfig:
    return LanguageModelConfig(
        path=str(folder),
        random=not has_weights(folder),
        activation_checkpointing=checkpointing and config.actor.activation_checkpointing,
    )
