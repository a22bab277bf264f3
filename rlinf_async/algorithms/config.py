"""Which advantage and which loss, and their coefficients. Imports no torch."""

from __future__ import annotations

import math
from typing import Literal

import msgspec


class AdvantageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which advantage, and its discounts."""

    name: str = "gae"
    gamma: float = 0.99
    gae_lambda: float = 0.95
    level: Literal["chunk", "action", "token"] = "chunk"
    """where actions come in chunks or tokens: what has a reward, a value and an advantage"""
    group_size: int = 1
    """episodes from the same initial state; taken from the environments"""

    def __post_init__(self) -> None:
        for field in ("gamma", "gae_lambda"):
            number = getattr(self, field)
            if not 0.0 <= number <= 1.0:
                raise ValueError(f"{field} is {number}; it must lie between 0 and 1")


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which loss, and its coefficients."""

    name: str = "ppo"
    clip_low: float = 0.2
    """the ratio is clipped at ``1 - clip_low`` from below"""
    clip_high: float = 0.2
    """the ratio is clipped at ``1 + clip_high`` from above"""
    dual_clip: float | None = None
    """with a negative advantage the loss is at most ``-dual_clip * advantage``; above 1"""
    value_clip: float | None = None
    """largest change of a value from the old one, for the clipped value loss"""
    value_coefficient: float = 1.0
    """of half the mean squared error"""
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.clip_low < 1.0:
            raise ValueError(f"clip_low is {self.clip_low}; it must lie between 0 and 1")
        if not self.clip_high > 0.0:
            raise ValueError(f"clip_high is {self.clip_high}; it must be above 0")
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"dual_clip is {self.dual_clip}; it must be above 1, or left out")
        if self.value_clip is not None and not self.value_clip > 0.0:
            raise ValueError(f"value_clip is {self.value_clip}; it must be above 0, or left out")
        for field in ("value_coefficient", "entropy_coefficient"):
            number = getattr(self, field)
            if not math.isfinite(number):
                raise ValueError(f"{field} is {number}; it must be a finite number")
        if self.value_coefficient < 0.0:
            raise ValueError(
                f"value_coefficient is {self.value_coefficient}; it must be at least 0: the value "
                "would learn to be wrong"
            )
