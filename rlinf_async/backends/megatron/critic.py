"""`MegatronCriticTrainer`: the `LanguageTrainer` of a critic, over Megatron.

Its targets are the ``returns`` that `compute_advantages` computes from rewards and from the values
of this critic when the samples were collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from rlinf_async.backends.megatron.trainer import MegatronTrainerBase
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample
from rlinf_async.messages.weights import Allocate, WeightUpdate

NOT_A_POLICY = "a critic has no {what}: ask the actor (backend 'megatron')"


class MegatronCriticTrainer(MegatronTrainerBase):
    """Half the squared error of values, over packed samples, for one rank of a critic."""

    critic = True

    def values(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Return values ``[R]`` before each response token of the rank that reads, on every rank of
        its model. Collective."""
        return self._answers(samples, _as_they_are)

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Raise `ValueError`."""
        raise ValueError(NOT_A_POLICY.format(what="log-probs"))

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Raise `ValueError`: no engine takes a critic."""
        raise ValueError(NOT_A_POLICY.format(what="weights to publish"))

    def load(self, update: WeightUpdate) -> None:
        """Raise `ValueError`."""
        raise ValueError(NOT_A_POLICY.format(what="use for published weights"))

    def save_pretrained(self, folder: Path) -> None:
        """Raise `ValueError`: a value head has no place in a Hugging Face folder."""
        raise ValueError(NOT_A_POLICY.format(what="Hugging Face folder"))


def _as_they_are(found: Tensor) -> Tensor:
    return found
