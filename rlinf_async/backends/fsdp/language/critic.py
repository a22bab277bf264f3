"""`CriticTrainer`: the `LanguageTrainer` of a critic, over FSDP.

Its targets are the ``returns`` that `compute_advantages` computes from rewards and from the values
of this critic when the samples were collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from rlinf_async.backends.fsdp.errors import FSDPError
from rlinf_async.backends.fsdp.language.forward import token_answers
from rlinf_async.backends.fsdp.language.trainer import (
    LanguageTrainerBase,
)
from rlinf_async.backends.language_training.packing import Packed
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample
from rlinf_async.messages.weights import Allocate, WeightUpdate

NOT_A_POLICY = "a critic has no {what}: ask the actor (backend 'fsdp')"


class CriticTrainer(LanguageTrainerBase):
    """Half the squared error of values, over packed samples, for one rank of a critic."""

    critic = True

    def values(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Return values ``[R]`` before each response token. Collective."""

        def answer(packed: Packed) -> Tensor:
            value: Tensor = self.manager.model(packed)
            return value

        return token_answers(self.manager, samples, self.config.max_tokens_per_forward, answer)

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Raise `FSDPError`."""
        raise FSDPError(NOT_A_POLICY.format(what="log-probs"))

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Raise `FSDPError`: no engine takes a critic."""
        raise FSDPError(NOT_A_POLICY.format(what="weights to publish"))

    def load(self, update: WeightUpdate) -> None:
        """Raise `FSDPError`."""
        raise FSDPError(NOT_A_POLICY.format(what="use for published weights"))

    def save_pretrained(self, folder: Path) -> None:
        """Raise `FSDPError`: a value head has no place in a Hugging Face folder."""
        raise FSDPError(NOT_A_POLICY.format(what="Hugging Face folder"))
