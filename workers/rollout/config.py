"""The configuration of a rollout worker."""

from __future__ import annotations

import msgspec


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rollout worker."""

    max_batch: int = 1024
    """largest number of observations in one forward pass, which takes those that are ready"""
    seed: int = 0
    """seed of the sampled actions; every rank and every restart derives its own from it"""
    torch_threads: int = 1
    """threads of one forward pass; 0: torch's default"""

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.seed < 0 or self.torch_threads < 0:
            raise ValueError(
                f"max_batch is {self.max_batch}, seed is {self.seed}, torch_threads is "
                f"{self.torch_threads}; max_batch must be at least 1, the others at least 0"
            )
