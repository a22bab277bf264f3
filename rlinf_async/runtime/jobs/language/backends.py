"""From the run's configuration to those of its backends: engine, trainer, sizes of an iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rlinf_async.algorithms.language.config import LanguageLossConfig
from rlinf_async.backends.fsdp.language.config import (
    LanguageFSDPConfig,
    LanguageModelConfig,
    LanguageTrainerConfig,
)
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.warm_start import has_weights
from rlinf_async.workers.actor import LanguageBatches


def engine_config(config: LanguageConfig, model: Path) -> Any:
    """The rollout engine's own configuration: it reads the model folder, weights come later."""
    rollout = config.rollout
    if rollout.backend == "toy":
        return rollout.toy
    if rollout.backend == "vllm":
        return msgspec.structs.replace(rollout.vllm, model=str(model))
    return msgspec.structs.replace(rollout.transformers, model=str(model))


def trainer_config(config: LanguageConfig, model: Path) -> Any:
    """The actors' trainer's own configuration."""
    actor = config.actor
    if actor.backend == "toy":
        return actor.toy
    described = LanguageModelConfig(
        path=str(model),
        random=not has_weights(model),
        activation_checkpointing=actor.activation_checkpointing,
    )
    return LanguageTrainerConfig(
        fsdp=LanguageFSDPConfig(
            model=described,
            device=actor.device,
            precision=actor.precision,
            strategy=actor.strategy,
            optimizer=actor.optimizer,
            scheduler=actor.scheduler,
        ),
        advantage=actor.advantage,
        loss=actor.loss,
        reference=config.needs_reference,
        publish_precision=actor.publish_precision,
        seed=config.seed,
    )


def critic_config(config: LanguageConfig, model: Path) -> Any:
    """The critics' trainer's own configuration: the actor's, but for what ``[critic]`` says."""
    actor, critic = config.actor, config.critic
    if actor.backend == "toy":
        return actor.toy
    folder = Path(critic.path).expanduser() if critic.path else model
    described = LanguageModelConfig(
        path=str(folder),
        random=not has_weights(folder),
        activation_checkpointing=actor.activation_checkpointing,
    )
    return LanguageTrainerConfig(
        fsdp=LanguageFSDPConfig(
            model=described,
            device=critic.device or actor.device,
            precision=critic.precision or actor.precision,
            strategy=actor.strategy,
            optimizer=critic.optimizer,
            scheduler=critic.scheduler,
        ),
        advantage=actor.advantage,
        loss=LanguageLossConfig(aggregation=actor.loss.aggregation),
        value_clip=critic.value_clip,
        seed=config.seed,
    )


def batches(config: LanguageConfig) -> LanguageBatches:
    """How an iteration is cut up."""
    actor = config.actor
    return LanguageBatches(
        samples=config.iteration_samples,
        group_size=config.training.group_size,
        optimizer_steps=actor.global_batches,
        epochs=actor.epochs,
        micro_batch_size=actor.micro_batch_size,
        max_tokens_per_micro_batch=actor.max_tokens,
        balance_window=actor.balance_window,
    )


def critic_batches(config: LanguageConfig) -> LanguageBatches:
    """How a critic cuts an iteration up: as the actors do, but for its own micro-batches."""
    size = config.critic.micro_batch_size
    if size is None:
        return batches(config)
    return msgspec.structs.replace(
        batches(config), micro_batch_size=size, max_tokens_per_micro_batch=None, balance_window=None
    )
