"""Starts workers, calls them, keeps them alive, and takes them down."""

from rlinf_async.runtime.calls import GroupCall, WorkerGroup, WorkerRef
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.homes import HomedChannel
from rlinf_async.runtime.launching import Packed, Placement, Ranks, Spread
from rlinf_async.runtime.signals import RunSignals, Terminated, run, run_signals
from rlinf_async.runtime.supervise import Never, Restart

__all__ = [
    "Cluster",
    "GroupCall",
    "HomedChannel",
    "Never",
    "Packed",
    "Placement",
    "Ranks",
    "Restart",
    "RunSignals",
    "Spread",
    "Terminated",
    "WorkerGroup",
    "WorkerRef",
    "run",
    "run_signals",
]
