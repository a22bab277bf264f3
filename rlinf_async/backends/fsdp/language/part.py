"""FSDP as a trainer of language models in a run. No torch."""

from __future__ import annotations

from typing import Any

from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.parts import LANGUAGE_IMPORTS, LanguageTrainerPart, Learner
from rlinf_async.config.registry import ConfigError

MODULE = "rlinf_async.backends.fsdp.language.trainer"


class FSDP(LanguageTrainerPart):
    """Data parallel ranks that share parameters, gradients and optimizer state."""

    library = "transformers"
    extra = "llm"
    factory = f"{MODULE}:PolicyTrainer"
    slow_imports = (*LANGUAGE_IMPORTS, MODULE)
    actor = "rlinf_async.workers.actor:FSDPActor"
    critic = "rlinf_async.workers.critic:FSDPCritic"
    critic_trainer = "fsdp_critic"
    sees_images = True
    tells_distributions = True
    honours = frozenset({"logit_bias", "routing_replay"})

    def config(self, learner: Learner) -> LanguageTrainerConfig:
        """Return the trainer's configuration."""
        return LanguageTrainerConfig(
            fsdp=LanguageFSDPConfig(
                model=learner.model,
                device=learner.device,
                precision=learner.precision,
                strategy=learner.strategy,
                optimizer=learner.optimizer,
                scheduler=learner.scheduler,
            ),
            **learner.training(),
        )

    def can_offload(self, learner_strategy: str) -> bool:
        """Whether parameters can leave their device and come back: only those of fsdp2 can."""
        return learner_strategy != "fsdp1"

    def check_adapter(self, learner_strategy: str) -> None:
        """Refuse fsdp1, which cannot save an optimizer that has state of some parameters alone."""
        if learner_strategy == "fsdp1":
            raise ConfigError(
                "fsdp1 cannot save an optimizer with the state of an adapter (LoRA) alone: use "
                "'fsdp2', or leave actor.lora out",
                path=("strategy",),
            )

    def check_scheduled(self, learner_strategy: str, options: Any, wanted: str) -> None:
        """Refuse fsdp1, whose ranks are fixed."""
        if learner_strategy == "fsdp1":
            raise ConfigError(
                f"the scheduler changes the ranks of actors while they train, which fsdp1 cannot: "
                f"{wanted}use strategy = 'fsdp2'",
                path=("actor", "strategy"),
            )


class FSDPCriticPart(FSDP):
    """The FSDP trainer of a critic: a language model with a value head."""

    factory = f"{MODULE}:CriticTrainer"
    actor = ""
