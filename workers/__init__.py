"""Workers: the roles of a run."""

if __name__ != "rlinf_async.workers":
    raise ImportError(f"import this package as 'rlinf_async.workers', not as {__name__!r}")

from rlinf_async.workers.base import (
    BuildError,
    Deadlock,
    Device,
    Failure,
    Worker,
    WorkerDied,
    WorkerError,
    WorkerInfo,
    WorkerUnresponsive,
)

__all__ = [
    "BuildError",
    "Deadlock",
    "Device",
    "Failure",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerInfo",
    "WorkerUnresponsive",
]
