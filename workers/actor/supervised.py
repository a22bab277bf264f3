"""`SupervisedWorker`: trains a model on given responses, and writes it as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf_async.channels import Sender
from rlinf_async.messages.language import Tokens
from rlinf_async.workers.base import Worker


class SupervisedWorker(Worker):
    """One rank of a short supervised phase.

    Args:
        trainer: configuration of the language trainer.
        phase: its `SupervisedConfig`.
        backend: the trainer's registered name.
    """

    def __init__(self, trainer: Any, phase: Any, backend: str = "fsdp") -> None:
        self._backend_name = backend
        self._config = trainer
        self._phase = phase

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        from rlinf_async.backends.registry import LANGUAGE_TRAINERS, slow_imports

        return slow_imports(LANGUAGE_TRAINERS, arguments.get("backend"))

    async def setup(self) -> None:
        if self.world_size > 1:
            await self.join_collective()

    async def fit(
        self, examples: list[tuple[Tokens, Tokens]], folder: str, losses: Sender[float]
    ) -> None:
        """Train on ``(prompt [P], response [R])`` and write the model.

        Args:
            examples: the same on every rank.
            folder: where the model is written.
            losses: the loss of every step is put here, by rank 0.
        """
        with self.span("supervised"):
            trainer, steps = await self.compute(self._begin, examples)
            while (loss := await self.compute(next, steps, None)) is not None:
                if self.rank == 0:
                    await losses.put(loss)
            await self.compute(trainer.save_pretrained, Path(folder))

    def _begin(self, examples: list[tuple[Tokens, Tokens]]) -> tuple[Any, Iterator[float]]:
        """The trainer, and its steps, which are taken one by one."""
        from rlinf_async.backends.language_training.supervised import Example, supervised_steps
        from rlinf_async.backends.registry import load_language_trainer

        make: Any = load_language_trainer(self._backend_name)
        trainer = make(self._config, self.world_size, self.rank)
        return trainer, supervised_steps(trainer, [Example(*one) for one in examples], self._phase)
