"""Who gets which devices, and when: states, decisions, policies, and the ledger. Pure: no torch, no
channels, no workers.

::

    ClusterState --> policy.decide() --> ScalingDecision --> validate() --> carried out elsewhere

See ``docs/scheduling.md``.
"""

from rlinf_async.scheduling.config import SchedulingConfig
from rlinf_async.scheduling.policy import (
    POLICIES,
    SafePolicy,
    ScalingPolicy,
    load_policy,
    safe,
)
from rlinf_async.scheduling.state import (
    ACTOR,
    ActorState,
    ClusterState,
    DeviceLedger,
    DeviceLoan,
    DeviceTaken,
    Holding,
    InstanceState,
    InvalidDecision,
    Migration,
    Rates,
    RequestState,
    Resume,
    ScalingDecision,
    actor_after,
    check,
    holdings_after,
    instance_name,
    validate,
)

__all__ = [
    "ACTOR",
    "POLICIES",
    "ActorState",
    "ClusterState",
    "DeviceLedger",
    "DeviceLoan",
    "DeviceTaken",
    "Holding",
    "InstanceState",
    "InvalidDecision",
    "Migration",
    "Rates",
    "RequestState",
    "Resume",
    "SafePolicy",
    "ScalingDecision",
    "ScalingPolicy",
    "SchedulingConfig",
    "actor_after",
    "check",
    "holdings_after",
    "instance_name",
    "load_policy",
    "safe",
    "validate",
]
