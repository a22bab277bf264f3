"""Verifiers that runs of tests name by import path."""

from __future__ import annotations

from rlinf_async.rewards import Answer


def letters(answer: Answer) -> float:
    """The share of letters: a random model gets something, and learns."""
    return sum(one.isalpha() for one in answer.text) / 8


def text(answer: Answer) -> str:
    """Not a number."""
    return f"good: {answer.text}"


def equal(answer: Answer) -> float:
    """The same for everybody."""
    return 0.5


def hangs(answer: Answer) -> float:
    """Never says anything."""
    while True:
        pass
