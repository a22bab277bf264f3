"""Settings of soft actor-critic. No torch."""

from __future__ import annotations

import math

import msgspec

from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.config import ShardingConfig
from rlinf_async.messages.weights import DEFAULT_BUCKET_BYTES


class SacOptimizerConfig(OptimizerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW; ``value_lr`` is of the critics."""

    eps: float = 1e-8
    max_grad_norm: float | None = None


class SacPolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Networks of the policy and of both critics, which share no layers but those of images."""

    hidden_sizes: tuple[int, ...] = (256, 256)
    """ReLU between them"""
    channels: tuple[int, ...] = (32, 32, 32, 32)
    """of images: outputs of the convolutions, which halve height and width"""

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.hidden_sizes):
            raise ValueError(f"hidden_sizes is {list(self.hidden_sizes)}; all must be at least 1")
        if not self.channels or any(count < 1 for count in self.channels):
            raise ValueError(
                f"channels is {list(self.channels)}; there must be at least one, each at least 1"
            )


class SacShardingConfig(ShardingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model of soft actor-critic, and how it is optimised."""

    policy: SacPolicyConfig = SacPolicyConfig()
    optimizer: SacOptimizerConfig = SacOptimizerConfig()


class SacLossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The algorithm's own numbers."""

    gamma: float = 0.99
    """discount"""
    tau: float = 0.005
    """share by which the target critics move towards the critics after each gradient step"""
    entropy_coefficient: float | None = None
    """"alpha"; learnt when left out"""
    initial_entropy_coefficient: float = 1.0
    """where it is learnt"""
    target_entropy: float | None = None
    """where it is learnt; minus the number of values of an action when left out"""
    image_shift: int = 4
    """pixels by which each image of a batch is shifted at random, at most; 0: none"""

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"gamma is {self.gamma}; it must lie between 0 and 1")
        if not 0.0 < self.tau <= 1.0:
            raise ValueError(f"tau is {self.tau}; it must be above 0 and at most 1")
        fixed = self.entropy_coefficient
        if fixed is not None and not 0.0 <= fixed < math.inf:
            raise ValueError(
                f"entropy_coefficient is {fixed}; it must be at least 0, or left out to be learnt"
            )
        if not 0.0 < self.initial_entropy_coefficient < math.inf:
            raise ValueError(
                f"initial_entropy_coefficient is {self.initial_entropy_coefficient}; it must be "
                "above 0"
            )
        if self.image_shift < 0:
            raise ValueError(f"image_shift is {self.image_shift}; it must be at least 0")
        if self.target_entropy is not None and not math.isfinite(self.target_entropy):
            raise ValueError(
                f"target_entropy is {self.target_entropy}; it must be a finite number, or left out"
            )


class SacTrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The actor: its model, its losses."""

    fsdp: SacShardingConfig = SacShardingConfig()
    sac: SacLossConfig = SacLossConfig()
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """of the published weights"""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}; it must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0")
