"""Settings of the Megatron backend. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from rlinf_async.backends.language_training.config import (
    LanguageModelConfig,
    LanguageTrainingConfig,
)
from rlinf_async.backends.optimizer_config import OptimizerConfig, SchedulerConfig
from rlinf_async.parallel import Strategy, StrategyError


class MegatronConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A language model, how it is cut over ranks, and how it is optimised."""

    model: LanguageModelConfig
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6, eps=1e-8, max_grad_norm=1.0)
    scheduler: SchedulerConfig = SchedulerConfig()
    precision: Literal["float32", "bfloat16"] = "float32"
    """of weights and arithmetic; gradients and the optimizer's own weights stay float32"""
    device: str = "cpu"
    """``"cpu"``, ``"cuda"`` or ``"cuda:1"``; several ranks take one of ``"cuda"`` each"""
    tp: int = 1
    """ranks that share each layer"""
    pp: int = 1
    """pipeline stages, which share the layers"""
    virtual_stages: int = 1
    """model chunks of each stage, whose passes are interleaved (``vpp_size``)"""
    cp: int = 1
    """ranks that share the tokens of each sample: not offered, see `offered`"""
    ep: int = 1
    """ranks that share the experts of each layer: not offered, see `offered`"""
    sequence_parallel: bool = False
    """tensor ranks share the tokens between layers, too"""
    distributed_optimizer: bool = True
    """data ranks share the optimizer's state (ZeRO 1), instead of having copies of it"""
    overlap: bool = False
    """reduce gradients while the backward pass goes on, gather parameters while the forward pass
    does"""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "virtual_stages", "cp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.virtual_stages > 1 and self.pp == 1:
            raise ValueError(
                f"virtual_stages is {self.virtual_stages}, but pp is 1: one stage has nothing to "
                "interleave; leave it out, or set pp"
            )
        if self.optimizer.value_lr is not None:
            raise ValueError("value_lr is for policies with a value of their own: leave it out")


class MegatronTrainerConfig(
    LanguageTrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A language actor that Megatron trains: its model, its advantages, its loss."""

    megatron: MegatronConfig


def strategy_of(cfg: MegatronConfig, world_size: int) -> Strategy:
    """Return the strategy of so many ranks. Raises `StrategyError` where they do not make it up."""
    part = cfg.tp * cfg.pp
    if world_size % part:
        near = [size for size in (world_size // part * part, -(-world_size // part) * part) if size]
        nearest = ", ".join(map(str, near))
        fault = f"tp={cfg.tp} x pp={cfg.pp} does not divide {world_size} ranks; nearest: {nearest}"
        raise StrategyError([fault])
    return Strategy(tp=cfg.tp, pp=cfg.pp, dp=world_size // part, virtual_stages=cfg.virtual_stages)
