"""What a policy and a critic learn from the samples of a micro-batch.

::

    samples --prepare--> Forward: packed tokens --model--> statistics, or values --answer--> Part
                  \\---- nothing has a gradient: `NothingToDo`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_async.algorithms.language.aggregation import share_of
from rlinf_async.algorithms.language.config import LanguageLossConfig
from rlinf_async.algorithms.language.losses import TokenLossInputs, token_loss, token_value_loss
from rlinf_async.backends.language_training.config import LanguageTrainingConfig
from rlinf_async.backends.language_training.packing import Packed, pack_samples
from rlinf_async.backends.language_training.token_statistics import TokenStatistics
from rlinf_async.backends.language_training.totals import (
    ENGINE_DIFFERENCE,
    ENGINE_TOKENS,
    NothingToDo,
    Part,
)
from rlinf_async.messages.language import TrainingSample

SUPERVISED = LanguageLossConfig(name="supervised")

SILENT_AT_ZERO = frozenset({"ppo", "gspo", "reinforce"})
"""losses without a gradient where the advantage is 0"""


class Forward(NamedTuple):
    """Samples that go through the model, and what becomes of the model's answer."""

    packed: Packed
    units: float
    """share of the denominator of all samples of the micro-batch (`aggregation.Share`)"""
    objective: Objective
    samples: Sequence[TrainingSample]
    masks: Sequence[NDArray[np.bool_]]
    """tokens in the loss, of each sample ``[R]``"""
    loss: LanguageLossConfig
    counts: bool
    """False: none of the samples has a gradient, and metrics are means over other samples"""
    version: int | None
    """that the weights are of, whose tokens are compared with the engine's; None: of none"""

    def answer(self, found: Any) -> Part:
        """Return the loss; ``found``: what the model computes for ``packed``."""
        part = self.objective.part(self, found)
        if self.counts:
            return part
        nothing = {name: torch.zeros_like(number) for name, number in part.metrics.items()}
        return part._replace(tokens=0, metrics=nothing)

    def column(self, name: str, fallback: str | None = None) -> Tensor:
        """Return a field of the samples at the tokens in the loss, ``[N]``."""
        parts = []
        for sample, mask in zip(self.samples, self.masks, strict=True):
            found = getattr(sample, name)
            if found is None and fallback is not None:
                found = getattr(sample, fallback)
            assert found is not None, name  # checked before, or asked for only where it is
            parts.append(found[mask])
        return torch.from_numpy(np.concatenate(parts)).to(self.packed.targets.device)


class Objective(ABC):
    """Losses of micro-batches."""

    def __init__(self, config: LanguageTrainingConfig) -> None:
        self.config = config

    def prepare(
        self,
        samples: Sequence[TrainingSample],
        device: torch.device,
        *,
        loss: LanguageLossConfig | None = None,
        always: bool,
        version: int | None = None,
    ) -> Forward | NothingToDo:
        """Pack the samples that have a gradient.

        ``always``: one sample even if none has, because other ranks compute at the same time.
        ``loss``: instead of the configured one. ``version``: that the weights are of. Raises
        `ValueError` for samples that are not ready.
        """
        loss = loss or self.config.loss
        self.check_ready(samples, loss)
        masks = [trained_tokens(sample) for sample in samples]
        units = sum(share_of(int(mask.sum()), loss.aggregation).units for mask in masks)
        forwarded = [
            sample
            for sample, mask in zip(samples, masks, strict=True)
            if mask.any() and not self.silent(sample, loss)
        ]
        counts = bool(forwarded)
        if not counts:
            if not always:
                return NothingToDo(units)
            forwarded = [samples[0]]
        masks = [trained_tokens(sample) for sample in forwarded]
        packed = pack_samples(forwarded, masks, device)
        return Forward(packed, units, self, forwarded, masks, loss, counts, version)

    @abstractmethod
    def check_ready(self, samples: Sequence[TrainingSample], loss: LanguageLossConfig) -> None:
        """Raise `ValueError` for a sample that lacks what the loss needs."""

    @abstractmethod
    def part(self, forward: Forward, found: Any) -> Part:
        """Return the loss of what the model has found."""

    def silent(self, sample: TrainingSample, loss: LanguageLossConfig) -> bool:
        """Whether the gradient of a sample is exactly 0, and need not be computed."""
        return False

    @property
    def recomputes(self) -> bool:
        """Whether the loss needs log-probs under the weights that the iteration began with."""
        return False


class PolicyObjective(Objective):
    """Policy-gradient losses, from log-probs and entropies."""

    @property
    def recomputes(self) -> bool:
        return self.config.loss.proximal == "step"

    def check_ready(self, samples: Sequence[TrainingSample], loss: LanguageLossConfig) -> None:
        for sample in samples:
            if sample.advantage is None:
                raise ValueError(
                    f"sample {sample.group}/{sample.index} has no advantage: call "
                    "compute_advantages() on its group first"
                )
            if loss.proximal == "step" and sample.prev_log_prob is None:
                raise ValueError(
                    f"sample {sample.group}/{sample.index} has no prev_log_prob, but loss.proximal "
                    "is 'step': fill it in with first_log_probs() before the first optimizer step"
                )

    def part(self, forward: Forward, found: TokenStatistics) -> Part:
        losses = token_loss(_loss_inputs(forward, found), forward.loss)
        weights = token_weights(forward.masks, forward.loss, losses.loss.device)
        metrics = {name: numbers.sum() for name, numbers in losses.metrics.items()}
        if forward.version is not None:
            metrics |= engine_difference(forward, found)
        total = (losses.loss * weights).sum()
        return Part(total, forward.units, len(forward.packed.rows), metrics)

    def silent(self, sample: TrainingSample, loss: LanguageLossConfig) -> bool:
        quiet = loss.name in SILENT_AT_ZERO and not (
            loss.kl_coefficient or loss.entropy_coefficient
        )
        return (
            self.config.skip_silent
            and quiet
            and sample.advantage is not None
            and not sample.advantage.any()
        )


class ValueObjective(Objective):
    """Half the squared error, from values ``[N]``."""

    def check_ready(self, samples: Sequence[TrainingSample], loss: LanguageLossConfig) -> None:
        for sample in samples:
            if sample.returns is None or sample.value is None:
                raise ValueError(
                    f"sample {sample.group}/{sample.index} has no returns or no values: a critic "
                    "trains on samples with its own values, after compute_advantages()"
                )

    def part(self, forward: Forward, found: Tensor) -> Part:
        returns = forward.column("returns")
        losses = token_value_loss(found, forward.column("value"), returns, self.config.value_clip)
        total = (losses * token_weights(forward.masks, forward.loss, losses.device)).sum()
        error = (found.detach() - returns).square()
        metrics = {"value": found.detach().sum(), "value_error": error.sum()}
        return Part(total, forward.units, len(forward.packed.rows), metrics)


def engine_difference(forward: Forward, now: TokenStatistics) -> dict[str, Tensor]:
    """Return the sum of the absolute differences between the engine's log-probs and those of this
    forward pass, over the tokens that weights of this version have generated, and their number."""
    same = torch.eq(forward.column("version"), forward.version or 0)
    difference = (now.log_prob.detach() - forward.column("log_prob")).abs()
    return {ENGINE_DIFFERENCE: difference.where(same, 0.0).sum(), ENGINE_TOKENS: same.sum()}


def token_weights(
    masks: Sequence[NDArray[np.bool_]], config: LanguageLossConfig, device: torch.device
) -> Tensor:
    """Return the weight ``[N]`` of each trained token in the sum of the losses."""
    counts = [int(mask.sum()) for mask in masks]
    shares = [share_of(count, config.aggregation).weight for count in counts]
    return torch.from_numpy(np.repeat(np.array(shares, np.float32), counts)).to(device)


def trained_tokens(sample: TrainingSample) -> NDArray[np.bool_]:
    """Return the mask of the tokens in the loss."""
    return sample.loss_mask if sample.scored else np.zeros_like(sample.loss_mask)


def _loss_inputs(forward: Forward, now: TokenStatistics) -> TokenLossInputs:
    column = forward.column
    behaviour = column("log_prob")
    proximal = {
        "auto": lambda: column("prev_log_prob", "log_prob"),
        "behaviour": lambda: behaviour,
        "current": lambda: now.log_prob.detach(),
        "step": lambda: column("prev_log_prob"),
    }[forward.loss.proximal]()
    with_reference = all(sample.ref_log_prob is not None for sample in forward.samples)
    counts = torch.tensor([int(mask.sum()) for mask in forward.masks])
    return TokenLossInputs(
        log_prob=now.log_prob,
        entropy=now.entropy,
        proximal_log_prob=proximal,
        behaviour_log_prob=behaviour,
        ref_log_prob=column("ref_log_prob") if with_reference else None,
        advantage=column("advantage"),
        sample=torch.repeat_interleave(counts).to(behaviour.device),
        samples=len(forward.samples),
    )
