"""A batch of samples, and the interface of what computes its gradient."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
"""names of what a `Gradient` returns, in this order"""


class FlatBatch(NamedTuple):
    """Samples in any order: ``[N]`` but for the first two. float32, discrete actions int64."""

    observation: Tensor
    """``[N, D]``, normalised already, once an iteration"""
    action: Tensor
    """``[N, A]``, or ``[N]``"""
    log_prob: Tensor
    """when it was sampled"""
    value: Tensor
    """when it was sampled"""
    advantage: Tensor
    returns: Tensor

    def take(self, order: Tensor) -> FlatBatch:
        """Return the samples in another order."""
        return FlatBatch(*(column.index_select(0, order) for column in self))


class Gradient(Protocol):
    """Adds ``share`` times the gradient of the mean loss over a (micro-)batch to ``.grad``."""

    def __call__(self, batch: FlatBatch, share: float) -> Tensor:
        """Return the `METRICS` of the batch, ``[5]``."""
        ...
