"""Samples with the log-probs and values of a trainer's forward pass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from rlinf_async.messages.language import Sample, Tokens, TrainingSample

if TYPE_CHECKING:
    from rlinf_async.backends.language import LanguageTrainer


def with_log_probs(
    trainer: LanguageTrainer, samples: list[Sample], *, reference: bool, previous: bool = True
) -> list[Sample]:
    """The samples with previous and, where asked for, reference log-probs."""
    bare = [as_bare(sample) for sample in samples]
    done = samples
    if previous:
        found = trainer.log_probs(bare)
        done = [
            msgspec.structs.replace(sample, prev_log_prob=log_prob)
            for sample, log_prob in zip(done, found, strict=True)
        ]
    if reference:
        found = trainer.log_probs(bare, reference=True)
        done = [
            msgspec.structs.replace(sample, ref_log_prob=log_prob)
            for sample, log_prob in zip(done, found, strict=True)
        ]
    return done


def with_values(trainer: LanguageTrainer, samples: list[Sample]) -> list[Sample]:
    """The samples with a critic's values."""
    found = trainer.values([as_bare(sample) for sample in samples])
    return [
        msgspec.structs.replace(sample, value=value)
        for sample, value in zip(samples, found, strict=True)
    ]


def as_bare(sample: Sample) -> TrainingSample:
    """A sample before its score, as a trainer's forward pass takes it."""
    request = sample.request
    return bare_sample(
        request.prompt.token_ids,
        sample.generated.token_ids,
        temperature=request.sampling.temperature or 1.0,
        group=request.group,
        index=request.index,
    )


def bare_sample(
    prompt_ids: Tokens,
    response_ids: Tokens,
    *,
    temperature: float = 1.0,
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
        reward=math.nan,
        scored=False,
    )
