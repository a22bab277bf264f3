"""Async actor-model framework for reinforcement-learning post-training.

The dozen names of everyday use. Importing them brings in neither torch nor ray.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rlinf_async.channels import (
    BatchResizingIterator,
    Channel,
    ChannelError,
    EndOfChannel,
    Latest,
    LatestReceiver,
    LatestSender,
    Lease,
    Receiver,
    Sender,
)
from rlinf_async.runtime import (
    Cluster,
    GroupCall,
    Never,
    Packed,
    Ranks,
    Restart,
    Spread,
    WorkerGroup,
    WorkerRef,
    run,
)
from rlinf_async.workers import BuildError, Deadlock, Worker, WorkerDied, WorkerError

if TYPE_CHECKING:  # they read run folders: what a worker need not import
    from rlinf_async.runtime.driving import RunFailed, TrainingRun, train

__version__ = "0.1.0"

__all__ = [
    "BatchResizingIterator",
    "BuildError",
    "Channel",
    "ChannelError",
    "Cluster",
    "Deadlock",
    "EndOfChannel",
    "GroupCall",
    "Latest",
    "LatestReceiver",
    "LatestSender",
    "Lease",
    "Never",
    "Packed",
    "Ranks",
    "Receiver",
    "Restart",
    "RunFailed",
    "Sender",
    "Spread",
    "TrainingRun",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerGroup",
    "WorkerRef",
    "run",
    "train",
]

_LATER = {"RunFailed", "TrainingRun", "train"}


def __getattr__(name: str) -> Any:
    """Import what only the caller of a run needs when it is asked for."""
    if name in _LATER:
        return getattr(importlib.import_module("rlinf_async.runtime.driving"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
