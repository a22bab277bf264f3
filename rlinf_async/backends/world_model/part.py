"""World models as something that is trained. No torch."""

from __future__ import annotations

from typing import ClassVar

from rlinf_async.backends.base import WorldModelLearner
from rlinf_async.backends.world_model.config import WorldModelTrainerConfig
from rlinf_async.config.registry import Part


class WorldModelPart(Part):
    """A world model, over `FSDPModelManager`."""

    factory = "rlinf_async.backends.world_model.trainer:WorldModelTrainer"
    collective: ClassVar[bool] = True
    """whether its ranks need torch.distributed"""

    def make(
        self, config: WorldModelTrainerConfig, world_size: int, rank: int, /
    ) -> WorldModelLearner:
        """Build one rank's trainer."""
        made: WorldModelLearner = self.by_factory(config, world_size, rank)
        return made
