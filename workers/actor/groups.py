"""Sample groups as batches, statistics of those that arrive, and their advantages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from rlinf_async.backends.language import LanguageTrainer, require_finite
from rlinf_async.messages.language import SampleGroup, TrainingSample

SEVERAL = -1
"""the group number of a batch with samples of several"""


class GroupOps:
    """`BatchOps` of sample groups: a batch is a `SampleGroup` of any samples."""

    def size(self, batch: SampleGroup, /) -> int:
        return len(batch.samples)

    def slice(self, batch: SampleGroup, start: int, stop: int, /) -> SampleGroup:
        return msgspec.structs.replace(batch, samples=batch.samples[start:stop])

    def concat(self, batches: Sequence[SampleGroup], /) -> SampleGroup:
        samples = [sample for batch in batches for sample in batch.samples]
        return SampleGroup(iteration=batches[0].iteration, group=SEVERAL, samples=samples)

    def lengths(self, batch: SampleGroup, /) -> Sequence[int]:
        return [sample.tokens for sample in batch.samples]


class ArrivalStatistics:
    """Statistics of the samples of one iteration that arrived on one rank.

    Raises from `add` `RuntimeError` for a token that is older than ``max_staleness`` versions
    (None: any may be) or newer than the weights that are trained, and `ModelOutputError` for a
    log-prob that is not finite.
    """

    def __init__(self, version: int, max_staleness: int | None) -> None:
        self._version = version
        self._limit = max_staleness
        self.groups = self.without_signal = self.samples = self.unscored = 0
        self.prompt_tokens = self.response_tokens = 0
        self.lag_max = self._lag_total = 0
        self.wait_seconds = 0.0
        """seconds that the trainer was idle until they arrived"""
        self._rewards: list[float] = []

    @property
    def lag_mean(self) -> float:
        """Mean over response tokens, in versions."""
        return self._lag_total / max(self.response_tokens, 1)

    @property
    def reward_mean(self) -> float:
        """Mean over scored samples; NaN without any."""
        return float(np.mean(self._rewards)) if self._rewards else float("nan")

    def add(self, group: SampleGroup) -> None:
        """Add a group."""
        rewards = [sample.reward for sample in group.samples if sample.scored]
        for sample in group.samples:
            _check_log_probs(sample)
            lags = self._version - sample.version
            if len(lags):
                self._check(group, int(lags.min()), int(lags.max()))
                self.lag_max = max(self.lag_max, int(lags.max()))
                self._lag_total += int(lags.sum())
            self.prompt_tokens += len(sample.prompt_ids)
            self.response_tokens += len(sample.response_ids)
        self._rewards += rewards
        self.groups += 1
        self.without_signal += len(set(rewards)) <= 1
        self.samples += len(group.samples)
        self.unscored += len(group.samples) - len(rewards)

    def _check(self, group: SampleGroup, newest: int, oldest: int) -> None:
        if newest < 0 or (self._limit is not None and oldest > self._limit):
            allowed = "any" if self._limit is None else str(self._limit)
            raise RuntimeError(
                f"group {group.group}, trained at version {self._version}, holds tokens that are "
                f"{newest} to {oldest} versions old, but max_staleness is {allowed}: its requests "
                "were admitted too early, or weights came from elsewhere"
            )


def _check_log_probs(sample: TrainingSample) -> None:
    """Raise `ModelOutputError` for a log-prob in the loss that is not finite."""
    if not sample.scored:
        return
    name, mask = f"sample {sample.group}/{sample.index}", sample.loss_mask
    for log_prob, whose in (
        (sample.log_prob, "the engine that generated it"),
        (sample.prev_log_prob, "the forward pass that recomputed it"),
        (sample.ref_log_prob, "the reference's forward pass"),
    ):
        if log_prob is not None:
            trained = np.where(mask, log_prob, np.float32(0.0))
            require_finite(trained, sample.response_ids, whose, name)


def with_advantages(trainer: LanguageTrainer, group: SampleGroup) -> SampleGroup:
    """Return the same samples with advantages and returns; existing ones are kept."""
    samples = trainer.compute_advantages(group.samples)
    return msgspec.structs.replace(group, samples=samples)
