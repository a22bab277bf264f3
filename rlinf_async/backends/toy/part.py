"""The toys as the engine and the trainer of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rlinf_async.backends.parts import EnginePart, LanguageTrainerPart, Learner
from rlinf_async.backends.toy.config import ToyEngineConfig, ToyPolicyConfig, ToyTrainerConfig


class ToyEnginePart(EnginePart):
    """A cost model that makes tokens up."""

    Config = ToyEngineConfig
    factory = "rlinf_async.backends.toy.engine:ToyEngine"
    has_weights = False
    exact = True

    def context(self, settings: ToyEngineConfig, model: Mapping[str, Any]) -> int:
        """Return its own: it has no model."""
        return settings.context


class ToyTrainerPart(LanguageTrainerPart):
    """A cost model of actors, critics and inference workers."""

    Config = ToyTrainerConfig
    factory = "rlinf_async.backends.toy.trainer:ToyTrainer"
    has_weights = False
    collective = False
    critic_trainer = "toy"

    def config(self, learner: Learner) -> ToyPolicyConfig:
        """Return the costs, and the loss, whose weights it computes."""
        return ToyPolicyConfig(loss=learner.loss, **msgspec.structs.asdict(learner.options))
