"""Async actor-model framework for reinforcement-learning post-training.

The dozen names of everyday use. Importing them brings in neither torch nor ray.
"""

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
    "Sender",
    "Spread",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerGroup",
    "WorkerRef",
    "run",
]
