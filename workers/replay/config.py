"""The configuration of a replay worker."""

from __future__ import annotations

from typing import Literal

import msgspec


class ReplayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The store of transitions, and how batches are drawn."""

    capacity: int = 1_000_000
    """transitions; the oldest make room for new ones"""
    batch_size: int = 256
    """transitions of one gradient step"""
    n_step: int = 1
    """steps of which a transition has the rewards; fewer where an episode or an iteration ends"""
    sampling: Literal["uniform", "prioritized"] = "uniform"
    """``prioritized``: in proportion to the last temporal-difference error"""
    priority_alpha: float = 0.6
    """exponent of priorities"""
    priority_beta: float = 0.4
    """exponent of the importance-sampling weights at first; it grows to 1 over the run"""
    storage: Literal["disk", "memory"] = "disk"
    """``disk``: memory-mapped files, which outlive a killed worker"""
    folder: str = ""
    """of these files; ``replay`` in the run folder when left out"""
    prefetch: int = 4
    """batches that are drawn ahead of the gradient step that needs them"""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("capacity", "batch_size", "n_step", "prefetch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0")
        if self.batch_size > self.capacity:
            raise ValueError(
                f"batch_size is {self.batch_size}, which is more than the capacity of "
                f"{self.capacity} transitions: make the store larger, or the batch smaller"
            )
        if not 0.0 < self.priority_alpha <= 1.0:
            raise ValueError(
                f"priority_alpha is {self.priority_alpha}; it must be above 0 and at most 1 "
                "(sampling = 'uniform' is what 0 would be)"
            )
        if not 0.0 <= self.priority_beta <= 1.0:
            raise ValueError(f"priority_beta is {self.priority_beta}; it must lie between 0 and 1")
        if self.folder and self.storage == "memory":
            raise ValueError(
                f"folder is {self.folder!r}, but storage = 'memory' has no files: leave it out, or "
                "set storage = 'disk'"
            )

    @property
    def prioritized(self) -> bool:
        """Whether transitions have priorities."""
        return self.sampling == "prioritized"
