"""The scheduler role: devices follow the work while the run goes on."""

from rlinf_async.workers.scheduler.changes import SchedulerSummary
from rlinf_async.workers.scheduler.holdings import first_orders
from rlinf_async.workers.scheduler.messages import (
    ActorChanged,
    ActorReady,
    Boundary,
    DataShare,
    DevicesReport,
    InstanceNews,
    InstanceReport,
    Orders,
    SchedulerReport,
    SchedulingConfig,
    Topology,
    Verdict,
)
from rlinf_async.workers.scheduler.worker import SchedulerWorker

__all__ = [
    "ActorChanged",
    "ActorReady",
    "Boundary",
    "DataShare",
    "DevicesReport",
    "InstanceNews",
    "InstanceReport",
    "Orders",
    "SchedulerReport",
    "SchedulerSummary",
    "SchedulerWorker",
    "SchedulingConfig",
    "Topology",
    "Verdict",
    "first_orders",
]
