"""``exact`` and ``numeric``: the answer is the reference, as text or as a number."""

from __future__ import annotations

from rlinf_async.rewards.answer import Answer, Reject, Verifier
from rlinf_async.rewards.numbers import last_number
from rlinf_async.rewards.registry import VERIFIERS


@VERIFIERS.register("exact")
def load_exact() -> Verifier:
    """1 where the answer is the reference, white space at either end aside; else 0."""
    return exact


@VERIFIERS.register("numeric")
def load_numeric() -> Verifier:
    """1 where the last number of the answer is exactly that of the reference; else 0."""
    return numeric


def exact(answer: Answer) -> float:
    """Whether the answer is the reference."""
    return float(answer.text.strip() == answer.reference.strip())


def numeric(answer: Answer) -> float:
    """Whether the last number in the answer equals the last one in the reference, exactly.

    ``1,234`` is 1234, ``.5`` and ``50%`` are 0.5: docs/language-data.md has a table. An answer
    without a number is wrong, also one whose number cannot be read for certain, or may have been
    cut off at max_tokens. A reference without one is rejected, for no answer could be right.
    """
    wanted = last_number(answer.reference)
    if wanted is None:
        raise Reject(f"the reference {answer.reference[:80]!r} holds no number, or an unclear one")
    found = last_number(answer.text)
    if found is None or (answer.finish == "length" and not found.end):
        return 0.0
    return float(found.agrees(wanted))
