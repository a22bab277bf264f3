"""Settings of optimizers, and the learning rate, whichever library trains. No torch."""

from __future__ import annotations

import math
from typing import Literal

import msgspec


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
        if self.kind == "constant" and self.total_steps:
            raise ValueError(
                f"total_steps is {self.total_steps}, but a constant schedule has no end: set kind "
                "to 'linear' or 'cosine', or leave it out"
            )
        if not 0.0 <= self.min_factor <= 1.0:
            raise ValueError(f"min_factor is {self.min_factor}; it must lie between 0 and 1")


def lr_factor(step: int, config: SchedulerConfig) -> float:
    """Return the factor of the learning rate for optimizer step ``step``, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.kind == "constant":
        return 1.0
    done = (step - config.warmup_steps) / (config.total_steps - config.warmup_steps)
    done = min(done, 1.0)
    left = 1.0 - done if config.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_factor + (1.0 - config.min_factor) * left
