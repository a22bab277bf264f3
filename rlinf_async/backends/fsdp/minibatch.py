"""A batch of samples, and the interface of what computes its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlinf_async.backends.policies.tensors import Observed, each

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
"""names of what a `Gradient` returns, in this order"""


class FlatBatch(NamedTuple):
    """Samples in any order: ``[N]`` but for the first two. float32, discrete actions int64."""

    observation: Observed
    """``[N, D]`` or fields by name; numbers are normalised already, once an iteration"""
    action: Tensor
    """``[N, A]``, or ``[N]``"""
    log_prob: Tensor
    """when it was sampled"""
    value: Tensor
    """when it was sampled"""
    advantage: Tensor
    returns: Tensor
    executed: Tensor | None = None
    """``[N, tokens]``: log-probs of the policy that count; the columns ``[N]`` above are then
    ``[N, parts]``, at the configured level (see `levels`). None: all do, one for each sample"""
    weight: Tensor | None = None
    """``[N, parts]``, of log-probs in means"""
    value_weight: Tensor | None = None
    """of values in means"""

    @property
    def vectors(self) -> Tensor:
        """Observations ``[N, D]``; raises `TypeError` where they have fields."""
        if not isinstance(self.observation, Tensor):
            raise TypeError(f"observations have the fields {list(self.observation)}")
        return self.observation

    def take(self, order: Tensor) -> FlatBatch:
        """Return the samples in another order."""

        def taken(column: Tensor) -> Tensor:
            return column.index_select(0, order)

        others = self._others()
        moved = (None if one is None else taken(one) for one in others)
        return FlatBatch._make((each(self.observation, taken), *moved))

    def split(self, size: int) -> Iterator[FlatBatch]:
        """Cut into batches of ``size`` samples; the last may be smaller."""
        pieces = -(-len(self.action) // size)
        others = [
            [None] * pieces if column is None else torch.split(column, size)
            for column in self._others()
        ]
        seen = self.observation
        if isinstance(seen, Tensor):
            observations: Iterable[Observed] = torch.split(seen, size)
        else:
            fields = zip(*(torch.split(field, size) for field in seen.values()), strict=True)
            observations = (dict(zip(seen, cut, strict=True)) for cut in fields)
        yield from map(FlatBatch._make, zip(observations, *others, strict=True))

    def _others(self) -> tuple[Any, ...]:
        return self[1:]


class Gradient(Protocol):
    """Adds ``share`` times the gradient of the mean loss over a (micro-)batch to ``.grad``."""

    def __call__(self, batch: FlatBatch, share: float) -> Tensor:
        """Return the `METRICS` of the batch, ``[5]``."""
        ...
