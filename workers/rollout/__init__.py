"""The rollout role: a policy that answers under the newest weights. Imports torch when used."""

from rlinf_async.backends.base import PolicyBackend, PolicyOutputError
from rlinf_async.workers.rollout.policy import (
    RolloutConfig,
    RolloutReport,
    RolloutWorker,
    WeightsEnded,
)

__all__ = [
    "PolicyBackend",
    "PolicyOutputError",
    "RolloutConfig",
    "RolloutReport",
    "RolloutWorker",
    "WeightsEnded",
]
