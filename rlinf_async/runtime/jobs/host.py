"""What every run is told of the host: how its workers are started, watched and restarted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from rlinf_async.runtime.cluster import Cluster


class HostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of ``[cluster]`` that is the same for every kind of run."""

    backend: Literal["process", "local"] = "process"
    threads: int = 1
    """of the arithmetic in each process (OMP_NUM_THREADS)"""
    max_restarts: int = 3
    """of each worker that may be restarted, within a minute, before its death ends the run"""
    deadlock_after: float | None = 30.0
    """seconds"""
    heartbeat_limit: float = 60.0
    """seconds after which a worker that does not answer is given up"""

    def __post_init__(self) -> None:
        check_counts(self, least=1, names=("threads",))
        check_counts(self, least=0, names=("max_restarts",))
        if self.deadlock_after is not None and not self.deadlock_after > 0.0:
            raise ValueError(
                f"deadlock_after is {self.deadlock_after}; it must be above 0, or 'none' to wait "
                "for ever"
            )
        if not self.heartbeat_limit > 0.0:
            raise ValueError(f"heartbeat_limit is {self.heartbeat_limit}; it must be above 0")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every worker's process."""
        one = {"OMP_NUM_THREADS": str(self.threads)}
        # A thread that spins while it waits for its neighbours keeps a core from another worker.
        return one if self.threads == 1 else one | {"OMP_WAIT_POLICY": "passive"}

    def make_cluster(self) -> Cluster:
        """The cluster that this describes, not entered."""
        if self.backend == "local":
            return Cluster.local(deadlock_after=self.deadlock_after)
        return Cluster.process(
            heartbeat_limit=self.heartbeat_limit, deadlock_after=self.deadlock_after
        )


def check_counts(config: msgspec.Struct, *, least: int, names: Sequence[str]) -> None:
    """Raise `ValueError` for the first of these fields that is below ``least``."""
    for name in names:
        if getattr(config, name) < least:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least {least}")
