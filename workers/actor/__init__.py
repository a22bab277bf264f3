"""Actors: the workers that train a policy."""

from rlinf_async.workers.actor.config import LanguageBatches
from rlinf_async.workers.actor.embodied import EmbodiedFSDPActor, TrainingPlan
from rlinf_async.workers.actor.errors import IncompleteShare, WeightsDisagree
from rlinf_async.workers.actor.fsdp import FSDPActor
from rlinf_async.workers.actor.language import LanguageActor
from rlinf_async.workers.actor.megatron import MegatronActor
from rlinf_async.workers.actor.sac import GradientPlan, SacActor, SacReport
from rlinf_async.workers.actor.strategy import AppliedStrategy

__all__ = [
    "AppliedStrategy",
    "EmbodiedFSDPActor",
    "FSDPActor",
    "GradientPlan",
    "IncompleteShare",
    "LanguageActor",
    "LanguageBatches",
    "MegatronActor",
    "SacActor",
    "SacReport",
    "TrainingPlan",
    "WeightsDisagree",
]
