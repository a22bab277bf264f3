"""The reward role: samples are scored as they finish."""

from rlinf_async.workers.reward.config import RewardConfig
from rlinf_async.workers.reward.worker import RewardReport, RewardWorker

__all__ = ["RewardConfig", "RewardReport", "RewardWorker"]
