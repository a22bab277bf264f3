"""`SupervisedWorker`: trains a model on given responses, and writes it as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinf_async.messages.language import Tokens
from rlinf_async.workers.base import Worker


class SupervisedWorker(Worker):
    """One rank of a short supervised phase.

    Args:
        trainer: configuration of the FSDP language trainer, with the loss ``supervised``.
        phase: its `SupervisedConfig`.
    """

    def __init__(self, trainer: Any, phase: Any) -> None:
        self._config = trainer
        self._phase = phase

    async def setup(self) -> None:
        if self.world_size > 1:
            await self.join_collective()

    async def fit(self, examples: list[tuple[Tokens, Tokens]], folder: str) -> list[float]:
        """Train on ``(prompt [P], response [R])``, write the model, return the loss of every step.

        Args:
            examples: the same on every rank.
            folder: where the model is written.
        """
        with self.span("supervised"):
            return await self.compute(self._fit, examples, Path(folder))

    def _fit(self, examples: list[tuple[Tokens, Tokens]], folder: Path) -> list[float]:
        from rlinf_async.backends.fsdp.language.supervised import Example, fit_supervised
        from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer

        trainer = PolicyTrainer(self._config, self.world_size, self.rank)
        losses = fit_supervised(trainer, [Example(*one) for one in examples], self._phase)
        trainer.save_pretrained(folder)
        return losses
