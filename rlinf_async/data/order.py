"""Which record comes when: pure functions of the seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_SPLIT, _EPOCH = 0, 1  # two streams of random numbers that have nothing to do with one another


def split(records: int, held_out: int, seed: int) -> tuple[Indices, Indices]:
    """Indices ``[records - held_out]`` for training, in order, and ``[held_out]`` kept back."""
    chosen = np.random.default_rng((seed, _SPLIT)).permutation(records)[:held_out]
    kept = np.sort(chosen).astype(np.int64)
    return np.setdiff1d(np.arange(records, dtype=np.int64), kept), kept


def order_of(indices: Indices, seed: int, epoch: int, *, shuffle: bool) -> Indices:
    """The order of one epoch."""
    if not shuffle:
        return indices
    return np.random.default_rng((seed, _EPOCH, epoch)).permutation(indices)
