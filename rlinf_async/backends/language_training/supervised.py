"""A short supervised phase: a model learns to respond at all, before reinforcement learning.

It uses the trainer of reinforcement learning, with the loss ``supervised``: the mean cross-entropy
of the response tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from rlinf_async.backends.language import MicroBatch
from rlinf_async.backends.language_training.config import SupervisedConfig
from rlinf_async.messages.language import Example
from rlinf_async.parallel import DataRank

__all__ = ["Example", "SupervisedTrainer", "fit_supervised", "supervised_steps"]


class SupervisedTrainer(Protocol):
    """A trainer of a policy."""

    @property
    def data_rank(self) -> DataRank:
        """Share of the samples that this rank trains on."""
        ...

    def supervised_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Make one optimizer step on the cross-entropy of the responses. Collective."""
        ...


def fit_supervised(
    trainer: SupervisedTrainer, examples: Sequence[Example], config: SupervisedConfig
) -> list[float]:
    """Train on shuffled examples, epoch after epoch; return the loss of every step. Collective.

    Raises: as `supervised_steps`.
    """
    return list(supervised_steps(trainer, examples, config))


def supervised_steps(
    trainer: SupervisedTrainer, examples: Sequence[Example], config: SupervisedConfig
) -> Iterator[float]:
    """Train one step for each item that is taken: its loss. Collective.

    Every rank is given all examples and trains on its part of each batch. Raises `ValueError` for
    fewer examples than a batch, and a batch that the ranks do not divide.
    """
    rank, ranks, is_io = trainer.data_rank
    if len(examples) < config.batch_size:
        raise ValueError(
            f"{len(examples)} examples do not fill one batch of batch_size {config.batch_size}"
        )
    if config.batch_size % ranks:
        raise ValueError(
            f"batch_size is {config.batch_size}; it must be a multiple of the {ranks} ranks"
        )
    batches = _batches(len(examples), config)
    for _ in range(config.steps):
        share = [examples[at].sample(at) for at in next(batches)[rank::ranks]]
        size = config.micro_batch_size or len(share)
        starts = range(0, len(share), size)
        micro_batches = [
            MicroBatch(share[start : start + size], start == starts[-1], len(starts))
            for start in starts
        ]
        yield trainer.supervised_step(micro_batches if is_io else ())["loss"]


def _batches(examples: int, config: SupervisedConfig) -> Iterator[list[int]]:
    random = np.random.default_rng(config.seed)
    while True:
        order = random.permutation(examples).tolist()
        for start in range(0, examples - config.batch_size + 1, config.batch_size):
            yield order[start : start + config.batch_size]
