"""``math``: the answer equals the reference as mathematics, by the library math-verify."""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from rlinf_async.config import needed
from rlinf_async.rewards.judging import Answer, Reject
from rlinf_async.rewards.matching import Number, last_number, with_plain_signs

DECIMALS: Final = 12
"""decimal places to which math-verify compares what is not a plain number"""
_NEGATED: Final = re.compile(r"(?:(?<!-)-|[=(,:$][ $]*-[ ]*)\Z")
"""end of the text before a box that is a sign, not the dash of a list's item"""
_BEGINS: Final = re.compile(r"-?\d+(?:\.\d+)?(?!\d*:)")
_RELATION: Final = re.compile(r"[<>!]|[\u2260\u2264\u2265]|\\(?:[gln]eq?|[gl]t)(?![A-Za-z])")
_MARKS: Final = ("$", "\\boxed", "\\(", "\\[")


library = needed("math_verify", extra="llm", needed_for="verifier 'math'")
for module in ("grader", "parser", "utils"):
    # They warn that no time limit is set: the scoring process has one.
    logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)


def equal(answer: Answer) -> float:
    """Return 1 where the last box of the answer, or else its last expression, equals the reference;
    else 0. Exactly where both are plain numbers, else by math-verify.

    Its own time limits are signals: the process has its own.
    """
    reference = with_plain_signs(answer.reference)
    marked = any(sign in reference for sign in _MARKS)
    wanted = [] if marked else _parse(f"${reference}$")
    wanted = wanted or _parse(reference)
    if not wanted:
        raise Reject(f"the reference {answer.reference[:80]!r} cannot be read as mathematics")
    text, boxed = _last_expression(with_plain_signs(answer.text))
    if text is None:
        return 0.0
    number, right = _number(text, boxed=boxed), _number(reference, boxed=True)
    if number is not None and right is not None:
        cut = answer.finish == "length" and not boxed and not number.end
        return float(number.agrees(right) and not cut)
    found = _parse(f"${text}$" if boxed else text)
    unclear = number is None and not boxed and not _marked(text)
    if unclear and found and last_number(found[-1]):
        return 0.0  # math-verify takes the 5 out of "4 or 5", the 4 out of "4 pi"
    if _unordered(found) and _ordered(wanted) and (not boxed or "\\{" in text):
        return 0.0  # math-verify takes the set {4, 5} for the pair (4, 5)
    return float(
        library.verify(
            wanted, found, float_rounding=DECIMALS, timeout_seconds=None, raise_on_error=True
        )
    )


def _last_expression(text: str) -> tuple[str | None, bool]:
    """The content of the last box, and that it is one; without boxes the whole text. None where
    the last box is empty, or never closed.

    math-verify would make one set of all boxes of a text.
    """
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return text.replace("\\$", ""), False  # of money; plain ones are of mathematics
    start = text.index("{", start) + 1
    depth = 1
    for brace in re.finditer(r"(?<!\\)[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            content = text[start : start + brace.start()].strip()
            if content and _NEGATED.search(text[: text.rindex("\\", 0, start)]):
                content = f"-({content})"
            return content or None, True
    return None, True


def _number(text: str, *, boxed: bool) -> Number | None:
    """The number that a text without further mathematics ends with; of a box all of it."""
    if _marked(text):
        inner = re.fullmatch(r"\s*(?:\$+|\\[(\[])([^$]*?)(?:\$+|\\[)\]])\s*\.?\s*", text)
        return _number(inner[1], boxed=True) if inner and inner[1] != text else None
    if boxed and not re.fullmatch(r"[-+$\u20ac\u00a3\u00a5 (]*[.\d].*", text, re.DOTALL):
        return None
    return last_number(f"{{{text}}}" if boxed else text)


def _marked(text: str) -> bool:
    """Whether there is mathematics between marks in it; a single dollar sign is of money."""
    return text.count("$") > 1 or any(sign in text for sign in _MARKS if sign != "$")


def _unordered(parsed: list[Any]) -> bool:
    return bool(parsed) and type(parsed[0]).__name__ == "FiniteSet"


def _ordered(parsed: list[Any]) -> bool:
    return bool(parsed) and type(parsed[0]).__name__ in ("Interval", "Tuple")


def _parse(text: str) -> list[Any]:
    """What math-verify reads; nothing where it would drop what stands beside a number."""
    parsed: list[Any] = library.parse(text, parsing_timeout=None)
    plain = text.strip("$ ")
    if not parsed or not getattr(parsed[0], "is_Number", False):
        return parsed
    begins = _BEGINS.match(plain)
    dropped = begins is not None and float(parsed[0]) == float(begins[0])
    unclear = dropped and last_number(f"{{{plain}}}") is None
    return [] if unclear or _RELATION.match(plain) else parsed
