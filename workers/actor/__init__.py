"""Actors: the workers that train a policy."""

from rlinf_async.workers.actor.embodied import (
    EmbodiedFSDPActor,
    GradientPlan,
    SacActor,
    SacReport,
    TrainingPlan,
)
from rlinf_async.workers.actor.language import (
    FSDPActor,
    LanguageActor,
    LanguageBatches,
    ShareOfLogProbs,
)
from rlinf_async.workers.actor.megatron import MegatronActor
from rlinf_async.workers.actor.training import AppliedStrategy, IncompleteShare, WeightsDisagree

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
    "ShareOfLogProbs",
    "TrainingPlan",
    "WeightsDisagree",
]
