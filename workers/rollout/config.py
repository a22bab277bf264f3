"""The configuration of a rollout worker."""

from __future__ import annotations

import msgspec

from rlinf_async.config.counts import MOST_THREADS, check_counts


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rollout worker."""

    max_batch: int = 1024
    """largest number of observations in one forward pass, which takes those that are ready"""
    seed: int = 0
    """seed of the sampled actions; every rank and every restart derives its own from it"""
    torch_threads: int = 1
    """threads of one forward pass; 0: torch's default"""

    def __post_init__(self) -> None:
        check_counts(self, least=1, names=("max_batch",))
        check_counts(self, least=0, names=("seed",))
        check_counts(self, least=0, names=("torch_threads",), most=MOST_THREADS)
