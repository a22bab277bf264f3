"""Critics: the workers that learn values of tokens, for PPO."""

from rlinf_async.workers.critic.worker import FSDPCritic, LanguageCritic, MegatronCritic

__all__ = ["FSDPCritic", "LanguageCritic", "MegatronCritic"]
