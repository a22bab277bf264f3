"""Actors: the workers that train a policy."""

from rlinf_async.workers.actor.embodied import EmbodiedFSDPActor, TrainingPlan

__all__ = ["EmbodiedFSDPActor", "TrainingPlan"]
