"""The configuration of a policy."""

from __future__ import annotations

import msgspec


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A registered policy. The sizes are 0 until the environment has been asked for them."""

    name: str = "mlp_gaussian"
    observation_size: int = 0
    action_size: int = 0
    """values of a continuous action, or the number of discrete ones"""
    hidden_sizes: tuple[int, ...] = (64, 64)
    initial_log_std: float = 0.0
    observation_clip: float = 10.0
    """bound of normalised observations, in both directions"""

    def __post_init__(self) -> None:
        if self.observation_size < 0 or self.action_size < 0:
            raise ValueError(
                f"observation_size is {self.observation_size}, action_size is {self.action_size}; "
                "they must be positive, or 0 to be taken from the environment"
            )
        if any(size < 1 for size in self.hidden_sizes):
            raise ValueError(f"hidden_sizes is {self.hidden_sizes}; every size must be at least 1")
        if not -20.0 <= self.initial_log_std <= 2.0:
            raise ValueError(
                f"initial_log_std is {self.initial_log_std}; it must lie between -20 and 2"
            )
        if not self.observation_clip > 0.0:
            raise ValueError(f"observation_clip is {self.observation_clip}; it must be above 0")
