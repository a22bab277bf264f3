"""The rollout role: a policy that answers under the newest weights. Imports torch when used."""

from rlinf_async.backends.base import PolicyBackend, PolicyOutputError
from rlinf_async.workers.rollout.config import RolloutConfig
from rlinf_async.workers.rollout.errors import WeightsEnded
from rlinf_async.workers.rollout.worker import RolloutReport, RolloutWorker

__all__ = [
    "PolicyBackend",
    "PolicyOutputError",
    "RolloutConfig",
    "RolloutReport",
    "RolloutWorker",
    "WeightsEnded",
]
