"""The configuration of a reward worker."""

from __future__ import annotations

import msgspec

from rlinf_async.channels.wire.session.secret import FILE_VARIABLE, VARIABLE
from rlinf_async.config.counts import MOST_WORKERS, check_counts


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reward worker."""

    processes: int = 2
    """processes, each of which scores a sample at a time; ``exact`` and ``numeric`` need none"""
    time_limit: float = 10.0
    """longest time of a verifier for one sample, in seconds"""
    memory_limit_mib: int = 4096
    """memory limit of each process; 0: none"""
    environment: tuple[str, ...] = ()
    """names of environment variables that verifiers get beside a minimal set, such as the key of a
    server that they ask"""
    preload: tuple[str, ...] = ()
    """verifiers imported before the first sample, so that a wrong name is an error at the start"""

    def __post_init__(self) -> None:
        check_counts(self, least=1, names=("processes",), most=MOST_WORKERS)
        check_counts(self, least=0, names=("memory_limit_mib",))
        if secret := sorted({VARIABLE, FILE_VARIABLE} & set(self.environment)):
            raise ValueError(
                f"environment has {secret[0]}: with the cluster's secret a verifier could be a "
                "worker; leave it out"
            )
        if not 0.0 < self.time_limit < float("inf"):
            raise ValueError(
                f"time_limit is {self.time_limit}; it must be a number of seconds above 0"
            )
