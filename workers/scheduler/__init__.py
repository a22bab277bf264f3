"""The scheduler role: devices follow the work while the run goes on."""

from rlinf_async.workers.scheduler.config import SchedulingConfig, Topology
from rlinf_async.workers.scheduler.messages import (
    ActorChanged,
    ActorReady,
    Boundary,
    DataShare,
    InstanceReport,
    Orders,
    SchedulerReport,
    Verdict,
)
from rlinf_async.workers.scheduler.worker import SchedulerSummary, SchedulerWorker

__all__ = [
    "ActorChanged",
    "ActorReady",
    "Boundary",
    "DataShare",
    "InstanceReport",
    "Orders",
    "SchedulerReport",
    "SchedulerSummary",
    "SchedulerWorker",
    "SchedulingConfig",
    "Topology",
    "Verdict",
]
