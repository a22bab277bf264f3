"""How samples are scored."""

from __future__ import annotations

import msgspec


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reward worker."""

    processes: int = 2
    """samples that are scored at a time; ``exact`` and ``numeric`` need no process"""
    time_limit: float = 10.0
    """seconds that a verifier may take for one sample"""
    memory_limit_mib: int = 4096
    """of each process; 0: no limit"""
    preload: tuple[str, ...] = ()
    """verifiers that are imported before the first sample; a wrong name is an error then"""

    def __post_init__(self) -> None:
        if self.processes < 1 or self.memory_limit_mib < 0:
            raise ValueError(
                f"processes is {self.processes}, memory_limit_mib is {self.memory_limit_mib}; "
                "they must be at least 1 and 0"
            )
        if not 0.0 < self.time_limit < float("inf"):
            raise ValueError(
                f"time_limit is {self.time_limit}; it must be a number of seconds above 0"
            )
