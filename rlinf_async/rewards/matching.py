"""``exact`` and ``numeric``: the answer is the reference, as text or as a number."""

from __future__ import annotations

import re
from decimal import Context, Decimal, InvalidOperation
from typing import Final

from rlinf_async.rewards.answer import Answer, Reject, Verifier
from rlinf_async.rewards.registry import VERIFIERS

TOLERANCE: Final = Decimal("1e-6")
"""relative to the reference, or absolute where that is below 1"""

_NUMBER = re.compile(
    r"(?<![\w.])"  # not the end of a word or of another number
    r"[-+]?(?:\d{1,3}(?:,\d{3}){1,9}(?![\d,])|\d+)?(?:(?<=\d)\.?|\.(?=\d))\d*"
    r"(?:[eE][-+]?\d{1,4}(?!\d))?",
    re.ASCII,
)
_EXACTLY = Context(prec=60, traps=[InvalidOperation])


@VERIFIERS.register("exact")
def load_exact() -> Verifier:
    """1 where the answer is the reference, white space at either end aside; else 0."""
    return exact


@VERIFIERS.register("numeric")
def load_numeric() -> Verifier:
    """1 where the last number of the answer is that of the reference; else 0."""
    return numeric


def exact(answer: Answer) -> float:
    """Whether the answer is the reference."""
    return float(answer.text.strip() == answer.reference.strip())


def numeric(answer: Answer) -> float:
    """Whether the last number in the answer equals the last one in the reference.

    ``1,234`` is 1234 and ``.5`` is 0.5. An answer without a number is wrong; a reference without
    one is rejected, for no answer could be right.
    """
    wanted = last_number(answer.reference)
    if wanted is None:
        raise Reject(f"the reference {answer.reference[:80]!r} holds no number")
    found = last_number(answer.text)
    if found is None:
        return 0.0
    return float(_close(found, wanted))


def last_number(text: str) -> Decimal | None:
    """The last number of a text; None where there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def _close(found: Decimal, wanted: Decimal) -> bool:
    difference = abs(_EXACTLY.subtract(found, wanted))
    return difference <= _EXACTLY.multiply(TOLERANCE, max(abs(wanted), Decimal(1)))
