"""The sums of a global batch: gradient, loss and metrics are divided by them once.

::

    micro-batch -> token losses x weights -> sum -> backward      (again and again; undivided)
    ... the last one -> units of all ranks added up -> gradient / units -> clip -> optimizer

Invariant: gradient, loss and metrics are sums over samples divided once by sums over samples, so
they do not depend on micro-batches, on ranks, or on the order of arrival, but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rlinf_async.backends.base import TrainingDiverged


class Part(NamedTuple):
    """Contribution of one micro-batch; scalars."""

    loss: Tensor
    """weighted sum over its tokens, with its gradient"""
    units: float
    """share of the denominator (`aggregation.Share`)"""
    tokens: int
    """number of tokens that the metrics are sums over"""
    metrics: Mapping[str, Tensor]
    """sums over tokens"""


class NothingToDo(NamedTuple):
    """A micro-batch without any gradient that was not computed; it still counts."""

    units: float


class Totals:
    """Sums over the micro-batches of this rank, then of all."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.units = 0.0
        self.tokens = 0.0
        self.micro_batches = 0

    def add(self, part: Part | NothingToDo) -> None:
        self.micro_batches += 1
        self.units += part.units
        if isinstance(part, NothingToDo):
            return
        self.tokens += part.tokens
        for name, number in {"loss": part.loss.detach(), **part.metrics}.items():
            self.sums[name] = self.sums.get(name, 0.0) + number.double()

    def row(self, device: torch.device) -> Tensor:
        """Return what is to be added up over the ranks that train on other samples, float64. Their
        order of metrics is the same."""
        counts = torch.tensor([self.units, self.tokens], dtype=torch.float64, device=device)
        if not self.sums:
            return counts
        return torch.cat([counts, torch.stack([self.sums[name] for name in sorted(self.sums)])])

    def take(self, row: Tensor) -> None:
        """Take the sums of all ranks."""
        self.units, self.tokens = row[:2].tolist()
        self.sums = dict(zip(sorted(self.sums), row[2:], strict=True))

    def metrics(self) -> dict[str, float]:
        """Means: of the loss over units, of the others over tokens."""
        means = {name: float(total) / max(self.tokens, 1.0) for name, total in self.sums.items()}
        means["loss"] = float(self.sums.get("loss", 0.0)) / max(self.units, 1.0)
        return means | {"tokens": self.tokens, "micro_batches": float(self.micro_batches)}


def check_finite(metrics: Mapping[str, float], steps: int) -> None:
    """Raise `TrainingDiverged` for a loss that is not finite, after so many optimizer steps."""
    if math.isfinite(metrics["loss"]):
        return
    broken = [name for name, number in metrics.items() if not math.isfinite(number)]
    raise TrainingDiverged(
        f"the loss is {metrics['loss']} after {steps} optimizer steps (not finite: "
        f"{', '.join(broken)}); the weights are those of before. Look for NaN in rewards and "
        "log-probs, lower the learning rate, and go on from the last checkpoint"
    )
