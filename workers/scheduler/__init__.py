"""The scheduler role: devices follow the work while the run goes on."""

from rlinf_async.workers.scheduler.actor import ScheduledActor
from rlinf_async.workers.scheduler.changes import SchedulerSummary
from rlinf_async.workers.scheduler.holdings import first_orders
from rlinf_async.workers.scheduler.messages import (
    ActorChanged,
    ActorReady,
    DevicesReport,
    EndedCount,
    InstanceNews,
    InstanceReport,
    Orders,
    SamplesTold,
    SchedulerReport,
    Topology,
    Verdict,
)
from rlinf_async.workers.scheduler.rollout import EndedLog, ScheduledRollout
from rlinf_async.workers.scheduler.worker import SchedulerWorker

__all__ = [
    "ActorChanged",
    "ActorReady",
    "DevicesReport",
    "EndedCount",
    "EndedLog",
    "InstanceNews",
    "InstanceReport",
    "Orders",
    "SamplesTold",
    "ScheduledActor",
    "ScheduledRollout",
    "SchedulerReport",
    "SchedulerSummary",
    "SchedulerWorker",
    "Topology",
    "Verdict",
    "first_orders",
]
