"""Samples with the log-probs and values of a trainer's forward pass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from rlinf_async.backends.language import require_finite
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Kept, Sample, Tokens, TrainingSample

if TYPE_CHECKING:
    from rlinf_async.backends.language import LanguageTrainer


def with_log_probs(
    trainer: LanguageTrainer, samples: list[Sample], *, reference: bool, previous: bool = True
) -> list[Sample]:
    """The samples with previous and, where asked for, reference log-probs.

    A rank that does not read computes those of the rank that does, and returns none.

    Raises:
        ModelOutputError: one is not finite.
    """
    bare = [as_bare(sample) for sample in samples]
    done = samples
    if previous:
        whose = f"the actor's forward pass under weights version {trainer.version}"
        done = _with(done, "prev_log_prob", _finite(bare, trainer.log_probs(bare), whose))
    if reference:
        found = trainer.log_probs(bare, reference=True)
        done = _with(done, "ref_log_prob", _finite(bare, found, "the reference's forward pass"))
    return done


def _finite(bare: list[TrainingSample], found: list[Floats], whose: str) -> list[Floats]:
    for one, log_prob in zip(bare, found, strict=False):
        require_finite(log_prob, one.response_ids, whose, f"sample {one.group}/{one.index}")
    return found


def with_values(trainer: LanguageTrainer, samples: list[Sample]) -> list[Sample]:
    """The samples with a critic's values; none on a rank that does not read."""
    return _with(samples, "value", trainer.values([as_bare(sample) for sample in samples]))


def _with(samples: list[Sample], field: str, found: list[Floats]) -> list[Sample]:
    if not samples:
        return []
    return [
        msgspec.structs.replace(sample, **{field: one})
        for sample, one in zip(samples, found, strict=True)
    ]


def as_bare(sample: Sample) -> TrainingSample:
    """A sample before its score, as a trainer's forward pass takes it."""
    request = sample.request
    return bare_sample(
        request.prompt.token_ids,
        sample.generated.token_ids,
        temperature=request.sampling.temperature or 1.0,
        kept=sample.generated.kept,
        group=request.group,
        index=request.index,
    )


def bare_sample(
    prompt_ids: Tokens,
    response_ids: Tokens,
    *,
    temperature: float = 1.0,
    kept: Kept | None = None,
    group: int = 0,
    index: int = 0,
) -> TrainingSample:
    """A sample of tokens only, with an empty loss mask."""
    size = len(response_ids)
    return TrainingSample(
        group=group,
        index=index,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        loss_mask=np.zeros(size, np.bool_),
        log_prob=np.zeros(size, np.float32),
        version=np.zeros(size, np.int32),
        temperature=temperature,
        kept=kept,
        reward=math.nan,
        scored=False,
    )
