"""`WorldModelActor`: one rank that trains a world model; see `TrainingWorker`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf_async.backends.base import WorldModelLearner
from rlinf_async.parallel import StrategyError
from rlinf_async.workers.actor.training import TrainingWorker


class WorldModelActor(TrainingWorker[WorldModelLearner]):
    """One rank. Every rank has read the recorded episodes itself: nothing travels but numbers.

    Args:
        trainer: a `WorldModelTrainerConfig`.
        resume: folder of the checkpoint to go on from.
    """

    backend = "world_model"

    def __init__(self, trainer: Any, *, resume: str | None = None) -> None:
        super().__init__(trainer, backend=None, resume=resume)

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        return ("torch._dynamo", "torch.distributed.fsdp")

    @property
    def part(self) -> Any:
        from rlinf_async.backends.world_model.part import WorldModelPart

        return WorldModelPart()

    def check_share(self, dp: int) -> None:
        """Raise `StrategyError` for another number of ranks than were launched."""
        if dp != self.world_size:
            raise StrategyError(
                [f"dp={dp}: windows are divided among the {self.world_size} launched ranks"]
            )

    async def train(self, steps: int) -> dict[str, float]:
        """Take optimizer steps, an iteration of them; return means of losses. On all ranks."""
        with self.span("train", iteration=self._trainer.version):
            return dict(await self.compute(self._trainer.train, steps))

    async def measure(self) -> dict[str, float]:
        """Compare the model with held-out episodes. On all ranks."""
        with self.span("measure"):
            return dict(await self.compute(self._trainer.measure))

    async def export(self, file: str) -> None:
        """Write the model's file, from rank 0. On all ranks."""
        with self.span("export"):
            await self.compute(self._trainer.export, Path(file))
