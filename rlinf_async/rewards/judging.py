"""Verifiers by name, and from one answer to one typed outcome, whatever a verifier does.

::

    returns a finite number, or Scored   -> Scored
    raises Reject                        -> Rejected
    raises Retry, or a lost connection   -> Failed, but another call may do better
    anything else                        -> Failed, with what was wrong; never a silent 0

A name with a colon in it is the import path of a user's function.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

import msgspec

from rlinf_async.config.registry import Registry, UnknownName, raised
from rlinf_async.messages.language import MAX_REWARD, Failed, Outcome, Rejected, Sample, Scored


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
    """number of tokens that the model drew"""

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """The part of a sample that a verifier sees."""
        prompt = sample.request.prompt
        return cls(
            prompt=prompt.text,
            text=sample.text,
            reference=prompt.reference,
            finish=sample.generated.finish,
            tokens=sample.generated.drawn_tokens,
        )


class Reject(Exception):
    """Raised by a verifier that cannot judge: the sample is left out of training, and counted."""


class Retry(Exception):
    """Raised by a verifier that could judge later: its server is busy, or had no answer.

    Args:
        reason: what was wrong, for the error where no other call does better.
        after: seconds to wait at least, as a server says in ``Retry-After``.
    """

    def __init__(self, reason: str = "", *, after: float = 0.0) -> None:
        super().__init__(reason)
        if not 0.0 <= after < math.inf:
            raise ValueError(f"Retry(after={after}): it must be a number of seconds, 0 or more")
        self.after = float(after)


TRANSIENT: Final = frozenset({("httpx", "TransportError")})
"""package and name of classes of errors that may not come again, beside Python's own"""


class Attempt(NamedTuple):
    """What one call of a verifier came to."""

    outcome: Outcome
    retry_after: float | None = None
    """seconds to wait before another call, which may do better; None: it would not"""


Verdict = float | Scored
"""A reward, or one with its parts."""

Verifier = Callable[[Answer], Verdict] | Callable[[Answer], Awaitable[Verdict]]
"""Judges one answer. It runs in a process of its own: one answer at a time if it is a function, and
many if it is a coroutine function (`is_asynchronous`)."""


Finish = Callable[[Awaitable[Any]], Any]
"""Awaits the result of an asynchronous verifier."""

PACKAGE: Final = f"{Path(__file__).parents[1]}{os.sep}"
"""what the names of our own files begin with"""
MAX_TEXT: Final = 2_000
"""characters of a reason or an error: thousands of samples may fail alike"""


def is_asynchronous(verifier: Verifier) -> bool:
    """Whether many calls of this verifier may be open at a time: it is a coroutine function, or an
    object with such a ``__call__``."""
    return inspect.iscoroutinefunction(verifier) or inspect.iscoroutinefunction(
        getattr(verifier, "__call__", None)  # noqa: B004, it is called
    )


def judge(name: str, verifier: Verifier, answer: Answer, finish: Finish | None = None) -> Outcome:
    """Return the outcome; raises nothing but KeyboardInterrupt."""
    return attempt(name, verifier, answer, finish).outcome


def attempt(name: str, verifier: Verifier, answer: Answer, finish: Finish | None = None) -> Attempt:
    """Call a verifier once; raises nothing but KeyboardInterrupt."""
    try:
        verdict: Any = verifier(answer)
        if inspect.isawaitable(verdict):
            if finish is None:
                error = f"verifier {name!r} is asynchronous and was called inline"
                return Attempt(Failed(error=error))
            verdict = finish(verdict)
        return Attempt(outcome_of(name, verdict))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a verifier that exits has judged nothing
        return _failed_attempt(name, error)


async def attempt_beside(name: str, verifier: Verifier, answer: Answer) -> Attempt:
    """Call an asynchronous verifier once, beside other calls. Cancelled, it has failed."""
    try:
        verdict: Any = verifier(answer)
        return Attempt(outcome_of(name, await verdict))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _failed_attempt(name, error)


def _failed_attempt(name: str, error: BaseException) -> Attempt:
    """What an error that a verifier raised means."""
    if isinstance(error, Reject):
        return Attempt(Rejected(reason=cut_text(str(error)) or "no reason was given"))
    if isinstance(error, MemoryError):
        return Attempt(
            Failed(
                error=f"verifier {name!r} ran out of memory: the limit of a scoring process is "
                "memory_limit_mib"
            )
        )
    failed = Failed(error=f"verifier {name!r} raised {described(error)}")
    return Attempt(failed, pause_before_retry(error))


def pause_before_retry(error: BaseException) -> float | None:
    """Seconds to wait before a verifier that raised this is called again; None where that would
    not help: the error is none of a connection that was lost or a server that is slow or busy."""
    if isinstance(error, Retry):
        return error.after
    names = {(one.__module__.partition(".")[0], one.__name__) for one in type(error).__mro__}
    passing = isinstance(error, ConnectionError | TimeoutError) or names & TRANSIENT
    return 0.0 if passing else None


def outcome_of(name: str, verdict: Any, kind: str = "verifier") -> Outcome:
    """The return value of a verifier, or of another ``kind`` of judge, as an outcome."""
    if isinstance(verdict, Scored):
        for part, value in [("reward", verdict.reward), *dict(verdict.parts).items()]:
            if (wrong := _wrong(value)) is not None:
                return Failed(error=f"{kind} {name!r} returned Scored with {part} = {wrong}")
        if (wrong := _wrong(verdict.cost)) is not None or verdict.cost < 0:
            wrong = wrong or f"{verdict.cost}, below 0"
            return Failed(error=f"{kind} {name!r} returned Scored with cost = {wrong}")
        parts = {str(part): float(value) for part, value in verdict.parts.items()}
        return Scored(reward=float(verdict.reward), parts=parts, cost=float(verdict.cost))
    if (wrong := _wrong(verdict)) is not None:
        return Failed(error=f"{kind} {name!r} returned {wrong}")
    return Scored(reward=float(verdict))


def _wrong(value: Any) -> str | None:
    """Why this is no reward; None where it is one."""
    shown = f"{cut_text(repr(value), 80)} (a {type(value).__name__})"
    if isinstance(value, bool):
        return f"{shown}, not a number: return 1.0 or 0.0"
    if not isinstance(value, numbers.Real):
        return f"{shown}, not a number"
    try:
        finite = math.isfinite(value)
    except OverflowError:
        return f"{cut_text(str(type(value)), 80)} that is too large for a float"
    if not finite:
        return f"{shown}, not a finite number"
    if abs(float(value)) > MAX_REWARD:
        return f"{shown}, beyond {MAX_REWARD:g}, which training cannot compute with: scale it"
    return None


def described(error: BaseException) -> str:
    """The error, with the place where it was raised: in the user's code, if it was that."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    frames = [one for one in frames if not one.filename.startswith(PACKAGE)] or frames
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{cut_text(raised(error))}{where}"


def cut_text(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text of no more than ``limit`` characters that can be sent."""
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return text.encode(errors="backslashreplace").decode()  # lone surrogates cannot be sent


UnknownVerifier = UnknownName

BUILT_IN: Final = {
    "environment": "rlinf_async.rewards.matching:environment",
    "exact": "rlinf_async.rewards.matching:exact",
    "math": "rlinf_async.rewards.mathematics:equal",
    "none": "rlinf_async.rewards.matching:none",
    "numeric": "rlinf_async.rewards.matching:numeric",
    "reasoning_gym": "rlinf_async.rewards.reasoning:score",
}
"""import paths by name: the library of a verifier is imported where that is used"""

verifiers: Registry[Verifier] = Registry(
    "verifier", entries=BUILT_IN, group="rlinf_async.verifiers", called_with=("answer",)
)
register_verifier = verifiers.register

INLINE: Final = frozenset({"environment", "exact", "none", "numeric"})
"""verifiers that take microseconds and cannot hang, so they run without a process of their own"""


def load_verifier(name: str, path: tuple[str, ...] = ("verifier",)) -> Verifier:
    """Return the verifier of this name, importing what it needs; ``path`` is the setting.

    Raises:
        UnknownVerifier: no such name; the message lists what there is.
        ConfigError: an import path that leads to no function of one argument, an `Answer`.
        MissingExtra: a library that it needs is not installed.
    """
    return verifiers.load(name, path)
