"""What every kind of run notes of itself: its seconds, its restarts, how it ended."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from rlinf_async.runtime.cluster import Cluster


class TrainingClock:
    """Seconds of training, those before a resume included."""

    def __init__(self, before: float) -> None:
        self._start = time.monotonic() - before

    def __call__(self) -> float:
        return time.monotonic() - self._start


def restarts_of(cluster: Cluster) -> dict[str, int]:
    """How often each worker was restarted, of those that were."""
    return {
        supervisor.name: supervisor.restarts
        for group in cluster.groups.values()
        for supervisor in group.supervisors
        if supervisor.restarts
    }


def how_it_ended(error: BaseException) -> tuple[Literal["stopped", "failed"], str | None]:
    """The outcome of a run that did not end by itself, and its cause where it failed."""
    if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
        return "stopped", None
    return "failed", f"{type(error).__name__}: {error}"
