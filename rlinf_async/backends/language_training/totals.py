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
from typing import Final, NamedTuple

import torch
from torch import Tensor

from rlinf_async.backends.base import TrainingDiverged
from rlinf_async.backends.language import EngineDisagrees

ENGINE_DIFFERENCE: Final = "engine_actor_difference"
"""mean absolute difference between the engine's log-probs and the actor's, over the tokens that the
engine has generated under the weights of the actor's forward pass"""
ENGINE_TOKENS: Final = "engine_actor_tokens"
"""number of those tokens"""


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
        """Means: of the loss over units, of the difference to the engine over the tokens that were
        compared, of the others over tokens."""
        means = {name: float(total) / max(self.tokens, 1.0) for name, total in self.sums.items()}
        means["loss"] = float(self.sums.get("loss", 0.0)) / max(self.units, 1.0)
        if ENGINE_TOKENS in self.sums:
            compared = means[ENGINE_TOKENS] = float(self.sums[ENGINE_TOKENS])
            means[ENGINE_DIFFERENCE] = float(self.sums[ENGINE_DIFFERENCE]) / max(compared, 1.0)
            if not compared:
                del means[ENGINE_DIFFERENCE]
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


def check_engine(metrics: Mapping[str, float], tolerance: float | None, version: int) -> None:
    """Raise `EngineDisagrees` where the engine's log-probs of the tokens that it generated under
    this version differ from the actor's by more than the tolerance; None: by any number.

    The mean ratio alone would not do: under another policy of the same support it is 1, too.
    """
    difference = metrics.get(ENGINE_DIFFERENCE)
    if tolerance is None or difference is None or difference <= tolerance:
        return
    raise EngineDisagrees(
        f"version {version}: the engine's log-probs of the {metrics[ENGINE_TOKENS]:.0f} tokens "
        f"that it generated under these weights differ from the actor's by {difference:.2e} in the "
        f"mean (allowed {tolerance:.0e}), so another distribution would be trained than was "
        "sampled; the weights are those of before. The engine draws from other tokens than it "
        "tells, does not serve the weights that were published, or computes in another precision "
        "(then raise training.check_weights_tolerance)"
    )
