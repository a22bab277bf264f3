"""Settings of the FSDP backend, checked once, here. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from rlinf_async.algorithms.config import AdvantageConfig, LossConfig
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.messages.weights import DEFAULT_BUCKET_BYTES


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW. Comparisons are written so that NaN fails them."""

    lr: float = 3e-4
    value_lr: float | None = None
    """of the parameters that only the value uses; ``lr`` when left out"""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float | None = 0.5
    """over all parameters together; None measures but does not clip"""

    def __post_init__(self) -> None:
        if not self.lr > 0.0:
            raise ValueError(f"lr is {self.lr}; it must be above 0")
        if self.value_lr is not None and not self.value_lr > 0.0:
            raise ValueError(f"value_lr is {self.value_lr}; it must be above 0, or left out")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas is {self.betas}; both must be at least 0 and below 1")
        if not self.eps > 0.0:
            raise ValueError(f"eps is {self.eps}; it must be above 0")
        if not self.weight_decay >= 0.0:
            raise ValueError(f"weight_decay is {self.weight_decay}; it must be at least 0")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0.0:
            raise ValueError(
                f"max_grad_norm is {self.max_grad_norm}; it must be above 0, or left out"
            )


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The learning rate over optimizer steps, as a factor of its configured value."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """the factor rises in a line from near 0 to 1"""
    total_steps: int = 0
    """linear and cosine reach ``min_factor`` here, and stay"""
    min_factor: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}; it must be at least 0")
        if self.kind != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps is {self.total_steps}; a {self.kind} schedule with warmup_steps "
                f"{self.warmup_steps} needs more steps than that"
            )
        if not 0.0 <= self.min_factor <= 1.0:
            raise ValueError(f"min_factor is {self.min_factor}; it must lie between 0 and 1")


class ShardingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is sharded and optimised, whichever model it is."""

    strategy: Literal["fsdp1", "fsdp2"] = "fsdp2"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """of the arithmetic; parameters and optimizer stay float32. float16 scales the loss"""
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    critic_warmup_steps: int = 0
    """for so many optimizer steps only the value's own parameters change"""
    device: str = "cpu"
    """``"cpu"``, ``"cuda"`` or ``"cuda:1"``; several ranks take one of ``"cuda"`` each"""

    def __post_init__(self) -> None:
        if self.critic_warmup_steps < 0:
            raise ValueError(
                f"critic_warmup_steps is {self.critic_warmup_steps}; it must be at least 0"
            )
        if self.critic_warmup_steps and self.strategy == "fsdp1":
            raise ValueError(
                "critic_warmup_steps needs strategy 'fsdp2': fsdp1 cannot save an optimizer that "
                "holds state for a part of its parameters"
            )


class FSDPConfig(ShardingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy, how it is sharded, and how it is optimised."""

    policy: PolicyConfig = PolicyConfig()
    pretrained: str | None = None
    """folder of a Hugging Face causal language model; it takes the place of ``policy``"""


class PPOConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one batch is used. Sizes are of this rank."""

    epochs: int = 10
    minibatch_size: int = 256
    """samples of one optimizer step"""
    micro_batch_size: int | None = None
    """samples of one forward and backward pass; the minibatch when left out"""
    normalize_advantage: Literal["batch", "minibatch", "none"] = "minibatch"
    target_kl: float | None = None
    """stop the iteration after an epoch whose mean approximate KL is above this"""
    loss: LossConfig = LossConfig()
    fused: bool = True
    """use the hand-written gradient where there is one: the same numbers, faster"""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; it must be at least 1")
        if self.minibatch_size < 1:
            raise ValueError(f"minibatch_size is {self.minibatch_size}; it must be at least 1")
        micro = self.micro_batch_size
        if micro is not None and (micro < 1 or self.minibatch_size % micro):
            raise ValueError(
                f"micro_batch_size is {micro}; it must divide minibatch_size {self.minibatch_size}"
            )
        if self.target_kl is not None and not self.target_kl > 0.0:
            raise ValueError(f"target_kl is {self.target_kl}; it must be above 0, or left out")


class EmbodiedTrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An embodied actor: its model, its advantages, its updates, its normalisers."""

    fsdp: FSDPConfig = FSDPConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    ppo: PPOConfig = PPOConfig()
    normalize_observation: bool = True
    normalize_reward: bool = True
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """of the published weights"""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}; it must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0")
