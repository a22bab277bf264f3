"""The rollout role of language models: requests in, samples out, under the newest weights."""

from rlinf_async.workers.rollout.language.config import LanguageRolloutConfig
from rlinf_async.workers.rollout.language.progress import RolloutProgress
from rlinf_async.workers.rollout.language.worker import LanguageRolloutReport, LanguageRolloutWorker

__all__ = [
    "LanguageRolloutConfig",
    "LanguageRolloutReport",
    "LanguageRolloutWorker",
    "RolloutProgress",
]
