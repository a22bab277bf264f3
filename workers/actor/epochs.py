"""Several epochs over the samples of one iteration: their order, their end, their metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from rlinf_async.messages.language import SampleGroup


def shuffled(batch: SampleGroup, seed: tuple[int, ...]) -> SampleGroup:
    """The samples in another order, which the seed alone decides."""
    order = np.random.default_rng(seed).permutation(len(batch.samples))
    return msgspec.structs.replace(batch, samples=[batch.samples[at] for at in order])


def is_spent(steps: Sequence[Mapping[str, float]]) -> bool:
    """Whether the early stop by ratio (``early_stop_ratio``) held every sample of an epoch back:
    another one would teach nothing."""
    return all(step.get("early_stopped", 0.0) >= 1.0 for step in steps)


def means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the steps that measured it: one in which no sample had a gradient has less to
    tell. Of the gradient norm only over those where it is finite, if there are any."""
    found = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        numbers = [step[name] for step in steps if name in step]
        if name == "grad_norm":
            numbers = [number for number in numbers if math.isfinite(number)] or numbers
        found[name] = sum(numbers) / len(numbers)
    return found
