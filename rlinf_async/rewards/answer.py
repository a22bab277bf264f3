"""The argument of a verifier, and how a verifier refuses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, Self

import msgspec

from rlinf_async.messages.language import Sample, Scored


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One response to be judged."""

    prompt: str
    """text that the model read, after the chat template"""
    text: str
    """text of the response, without special tokens"""
    reference: str
    """right answer, or JSON of the verifier's own"""
    finish: Literal["stop", "length", "abort"] = "stop"
    """reason of the end; ``length``: cut at max_tokens"""
    tokens: int = 0
    """number of tokens of the response"""

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """The part of a sample that a verifier sees."""
        prompt = sample.request.prompt
        return cls(
            prompt=prompt.text,
            text=sample.text,
            reference=prompt.reference,
            finish=sample.generated.finish,
            tokens=len(sample.generated.token_ids),
        )


class Reject(Exception):
    """Raised by a verifier that cannot judge: the sample is left out of training, and counted."""


Verdict = float | Scored
"""A reward, or one with its parts."""

Verifier = Callable[[Answer], Verdict] | Callable[[Answer], Awaitable[Verdict]]
"""Judges one answer. It runs in a process of its own, one answer at a time."""
