"""One optimizer step from micro-batches that are still arriving.

::

    micro-batch -> token losses x weights -> sum -> backward      (again and again; undivided)
    ... the last one -> units of all ranks added up -> gradient / units -> clip -> optimizer

Invariant: gradient, loss and metrics are sums over samples divided once by sums over samples, so
they do not depend on micro-batches, on ranks, or on the order of arrival, but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rlinf_async.backends.base import TrainingDiverged
from rlinf_async.backends.fsdp import ranks
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.language import MicroBatch


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


PartOf = Callable[[MicroBatch], Part | NothingToDo]


class _Totals:
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

    def reduce(self, manager: FSDPModelManager) -> None:
        """Add up the sums of all ranks."""
        if manager.world_size == 1:
            return
        names = sorted(self.sums)
        counts = torch.tensor([self.units, self.tokens], dtype=torch.float64, device=manager.device)
        row = torch.cat([counts, torch.stack([self.sums[name] for name in names])])
        ranks.all_reduce(manager, row)
        self.units, self.tokens = row[:2].tolist()
        self.sums = dict(zip(names, row[2:], strict=True))

    def metrics(self) -> dict[str, float]:
        """Means: of the loss over units, of the others over tokens."""
        means = {name: float(total) / max(self.tokens, 1.0) for name, total in self.sums.items()}
        means["loss"] = float(self.sums.get("loss", 0.0)) / max(self.units, 1.0)
        return means | {"tokens": self.tokens, "micro_batches": float(self.micro_batches)}


def optimizer_step(
    manager: FSDPModelManager, micro_batches: Iterable[MicroBatch], part_of: PartOf
) -> dict[str, float]:
    """Make one optimizer step; return its metrics, equal on every rank. Collective.

    Without any trained token in the whole global batch there is no step (``empty`` is 1). Raises
    `TrainingDiverged`, before the weights change, when the loss is not finite.
    """
    manager.check_loaded("a training step")
    totals = _Totals()
    for micro_batch in micro_batches:
        with manager.before_micro_batch(manager.model, micro_batch.is_last):
            part = part_of(micro_batch)
            if isinstance(part, Part):
                manager.backward(part.loss)
        totals.add(part)
    totals.reduce(manager)
    metrics = totals.metrics()
    if not math.isfinite(metrics["loss"]):
        manager.zero_grad()
        raise TrainingDiverged(_why(metrics, manager.steps))
    if totals.units == 0:
        manager.zero_grad()
        return metrics | {"empty": 1.0, "skipped": 0.0, "grad_norm": 0.0, "lr": _lr(manager)}
    before = manager.skipped_steps
    # FSDP takes the mean of the ranks' gradients; here it is their sum that is divided.
    grad_norm, lrs = manager.optimizer_step(manager.world_size / totals.units)
    skipped = manager.skipped_steps - before
    return metrics | {
        "empty": 0.0,
        "skipped": float(skipped),
        "grad_norm": grad_norm,
        "lr": lrs[0],
    }


def _lr(manager: FSDPModelManager) -> float:
    return float(manager.optimizer.param_groups[0]["lr"])


def _why(metrics: Mapping[str, float], steps: int) -> str:
    broken = [name for name, number in metrics.items() if not math.isfinite(number)]
    return (
        f"the loss is {metrics['loss']} after {steps} optimizer steps (not finite: "
        f"{', '.join(broken)}); the weights are those of before. Look for NaN in rewards and "
        "log-probs, lower the learning rate, and go on from the last checkpoint"
    )
