"""Settings of the FSDP trainer of a language model. No torch."""

from __future__ import annotations

from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.config import ShardingConfig
from rlinf_async.backends.language_training.config import (
    LanguageModelConfig,
    LanguageTrainingConfig,
)


class LanguageFSDPConfig(ShardingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A language model, how it is sharded, and how it is optimised."""

    model: LanguageModelConfig
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6, eps=1e-8, max_grad_norm=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic_warmup_steps:
            raise ValueError(
                "critic_warmup_steps is for policies with a critic in the same model; the critic "
                "of a language model is a model of its own: leave it out"
            )


class LanguageTrainerConfig(
    LanguageTrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A language actor or critic that FSDP shards: its model, its advantages, its loss."""

    fsdp: LanguageFSDPConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora.rank and self.fsdp.strategy == "fsdp1":
            raise ValueError(
                "lora needs strategy 'fsdp2': fsdp1 cannot save an optimizer that holds state for "
                "a part of its parameters"
            )
