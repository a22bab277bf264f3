"""Async actor-model framework for reinforcement-learning post-training.

The dozen names of everyday use. A name brings in what it needs when it is first asked for, which is
neither torch nor ray: a trained policy that has left the framework loads none of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from rlinf_async.policy import Policy
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
    from rlinf_async.runtime.driving import RunFailed, TrainingRun, train
    from rlinf_async.workers import BuildError, Deadlock, Worker, WorkerDied, WorkerError

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
    "Policy",
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

_PLACES = {
    "policy": ("Policy",),
    "runtime": (
        *("Cluster", "GroupCall", "Never", "Packed", "Ranks", "Restart", "Spread", "WorkerGroup"),
        *("WorkerRef", "run"),
    ),
    "runtime.driving": ("RunFailed", "TrainingRun", "train"),
    "workers": ("BuildError", "Deadlock", "Worker", "WorkerDied", "WorkerError"),
}
"""modules of the names; those of others are in ``channels``"""


def __getattr__(name: str) -> Any:
    """Import what a name needs when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = next((one for one, names in _PLACES.items() if name in names), "channels")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{place}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
