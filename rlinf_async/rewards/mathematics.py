"""``math``: the answer equals the reference as mathematics, by the library math-verify."""

from __future__ import annotations

import importlib
import logging
from functools import partial
from typing import Any

from rlinf_async.config import MissingExtra
from rlinf_async.rewards.answer import Answer, Reject, Verifier
from rlinf_async.rewards.registry import VERIFIERS


@VERIFIERS.register("math")
def load_math() -> Verifier:
    """1 where the last expression of the answer (boxed ones first) equals the reference; else 0."""
    try:
        library = importlib.import_module("math_verify")
    except ModuleNotFoundError as error:
        missing = error.name or "math_verify"
        raise MissingExtra(missing, extra="llm", needed_for="verifier 'math'") from error
    for module in (
        "grader",
        "parser",
        "utils",
    ):  # they warn that no time limit is set: the process has one
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    return partial(equal, library)


def equal(library: Any, answer: Answer) -> float:
    """Compare with math-verify, whose own time limits are signals: the process has its own."""
    reference = answer.reference
    marked = any(sign in reference for sign in ("$", "\\boxed", "\\(", "\\["))
    wanted = [] if marked else _parse(library, f"${reference}$")
    wanted = wanted or _parse(library, reference)
    if not wanted:
        raise Reject(f"the reference {answer.reference[:80]!r} cannot be read as mathematics")
    found = _parse(library, answer.text)
    return float(library.verify(wanted, found, timeout_seconds=None, raise_on_error=True))


def _parse(library: Any, text: str) -> list[Any]:
    parsed: list[Any] = library.parse(text, parsing_timeout=None)
    return parsed
