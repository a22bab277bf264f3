"""`CriticTrainer`: the `LanguageTrainer` of a critic, over FSDP.

Its targets are the ``returns`` that `compute_advantages` computes from rewards and from the values
of this critic when the samples were collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlinf_async.algorithms.language.losses import token_value_loss
from rlinf_async.backends.fsdp.errors import FSDPError
from rlinf_async.backends.fsdp.language.forward import token_answers
from rlinf_async.backends.fsdp.language.packing import Packed, pack_samples
from rlinf_async.backends.fsdp.language.step import NothingToDo, Part
from rlinf_async.backends.fsdp.language.trainer import (
    LanguageTrainerBase,
    token_weights,
    trained_tokens,
)
from rlinf_async.backends.language import MicroBatch
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample
from rlinf_async.messages.weights import Allocate, WeightUpdate

NOT_A_POLICY = "a critic has no {what}: ask the actor (backend 'fsdp')"


class CriticTrainer(LanguageTrainerBase):
    """Half the squared error of values, over packed samples, for one rank of a critic."""

    critic = True

    def _part(self, micro_batch: MicroBatch) -> Part | NothingToDo:
        samples = micro_batch.samples
        for sample in samples:
            if sample.returns is None or sample.value is None:
                raise ValueError(
                    f"sample {sample.group}/{sample.index} has no returns or no values: a critic "
                    "trains on samples with its own values, after compute_advantages()"
                )
        config = self.config.loss
        forwarded, units = self._whole_batch(samples, [False] * len(samples), config)
        if not forwarded:
            return NothingToDo(units)
        masks = [trained_tokens(one) for one in forwarded]

        def column(name: str) -> Tensor:
            parts = [getattr(one, name)[mask] for one, mask in zip(forwarded, masks, strict=True)]
            return torch.from_numpy(np.concatenate(parts)).to(self.manager.device)

        packed = pack_samples(forwarded, masks, self.manager.device)
        with self.manager.autocast():
            value: Tensor = self.manager.model(packed)
        returns = column("returns")
        losses = token_value_loss(value, column("value"), returns, self.config.value_clip)
        total = (losses * token_weights(masks, config, losses.device)).sum()
        error = (value.detach() - returns).square()
        metrics = {"value": value.detach().sum(), "value_error": error.sum()}
        return Part(total, units, len(packed.rows), metrics)

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
