"""Verifiers and rules of groups, for `test_acceptance`."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_async.messages.language import ScoredSample
from rlinf_async.rewards import Answer, Scored


def even(answer: Answer) -> float:
    """Right by the characters: varied within a group, or not."""
    return float(sum(map(ord, answer.text)) % 2)


def shaped(answer: Answer) -> Scored:
    """A reward that always differs, around an outcome that does not always."""
    right = even(answer)
    return Scored(reward=right + 0.0001 * sum(map(ord, answer.text)), parts={"right": right})


def right(answer: Answer) -> float:
    """The same for every answer."""
    return 1.0


def never(group: Sequence[ScoredSample]) -> bool:
    return False


def strange(group: Sequence[ScoredSample]) -> bool:
    return "yes"  # type: ignore[return-value]


def broken(group: Sequence[ScoredSample]) -> bool:
    raise KeyError("nothing here")
