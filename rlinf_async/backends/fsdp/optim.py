"""Learning-rate schedule, parameter groups, loss scaling, and the counters of a training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from torch import Tensor, nn

from rlinf_async.backends.optimizer_config import OptimizerConfig

FSDP1_PREFIX = "_fsdp_wrapped_module."


class Counters(msgspec.Struct, frozen=True):
    """How far a training is, in optimizer steps. Part of checkpoints; equal on all ranks."""

    steps: int
    skipped_steps: int
    scaler_factor: float
    scaler_good_steps: int


def clean_name(name: str) -> str:
    """Return a parameter's name without the prefix of FSDP1."""
    return name.replace(FSDP1_PREFIX, "")


def parameter_groups(
    model: nn.Module, value_names: set[str], config: OptimizerConfig, *, freeze_rest: bool
) -> list[dict[str, Any]]:
    """Return the groups ``policy`` and ``value``, without empty ones.

    ``freeze_rest`` marks the policy's group frozen, for the critic's warm-up; raises `ValueError`
    when the model has no value parameters to warm up.
    """
    split: dict[str, list[nn.Parameter]] = {"policy": [], "value": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            split["value" if clean_name(name) in value_names else "policy"].append(parameter)
    if freeze_rest and not split["value"]:
        raise ValueError(
            "critic_warmup_steps is set, but the model names no parameters that only the value "
            "uses (value_parameter_names); set it to 0 or use a policy with a critic"
        )
    rates = {"policy": config.lr, "value": config.value_lr or config.lr}
    return [
        {
            "params": parameters,
            "lr": rates[group],
            "name": group,
            "frozen": freeze_rest and group == "policy",
        }
        for group, parameters in split.items()
        if parameters
    ]


class LossScaler:
    """Multiplies the loss so that float16 gradients do not vanish (Micikevicius et al. 2018).

    It halves its factor when a step was skipped, and doubles it after ``growth_interval`` good
    steps. Unlike torch's GradScaler it is given whether the (global) gradient norm was finite, so
    that all ranks always agree. A scaler that is not enabled keeps the factor at 1.
    """

    def __init__(self, *, enabled: bool, growth_interval: int = 2000) -> None:
        self.enabled = enabled
        self.factor = 2.0**16 if enabled else 1.0
        self.growth_interval = growth_interval
        self.good_steps = 0

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate."""
        return loss * self.factor if self.enabled else loss

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide the gradients by the factor, in place."""
        if self.enabled:
            for gradient in gradients:
                gradient.div_(self.factor)

    def update(self, *, finite: bool) -> None:
        """Choose the next factor, given whether this step's gradient norm was finite."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.factor /= 2.0
        elif self.good_steps == self.growth_interval:
            self.factor *= 2.0
            self.good_steps = 0
