"""The configuration of the flow policy."""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

from rlinf_async.config.counts import check_bounds

NOISES: Final = {"network": ("least_deviation", "largest_deviation"), "sde": ("noise_level",)}
"""the settings that each kind of noise has for itself"""


class FlowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The steps from noise to actions, and the noise in them that gives actions log-probs."""

    steps: int = 4
    """Euler steps from noise to an action"""
    noise: Literal["network", "sde"] = "network"
    """noise of the steps of sampled actions: a network says how much (ReinFlow), or a stochastic
    equation with the marginals of the flow (Flow-GRPO, pi-RL)"""
    least_deviation: float = 0.05
    """smallest standard deviation that the network of ``"network"`` can say"""
    largest_deviation: float = 0.2
    """largest one"""
    noise_level: float = 0.5
    """``a`` of ``"sde"``: its deviations are proportional to it"""

    def __post_init__(self) -> None:
        check_bounds(self, "steps", least=1)
        check_bounds(self, "least_deviation", "largest_deviation", above=0, most=1)
        # From sqrt(2) on, the first step of the equation would turn the noise around.
        check_bounds(self, "noise_level", above=0, below=math.sqrt(2.0))
        if self.least_deviation > self.largest_deviation:
            raise ValueError(
                f"least_deviation is {self.least_deviation}, which is above largest_deviation = "
                f"{self.largest_deviation}"
            )

    def ignored(self) -> tuple[str, str]:
        """Return a setting that was changed and that this kind of noise would ignore, and why; two
        empty ones if there is none."""
        for noise, names in NOISES.items():
            for name in names:
                changed = getattr(self, name) != getattr(FlowConfig(), name)
                if noise != self.noise and changed:
                    return name, (
                        f"it is a setting of noise = {noise!r}, but noise is {self.noise!r}, which "
                        f"would ignore it: leave it out, or set noise = {noise!r}"
                    )
        return "", ""
