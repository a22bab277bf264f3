"""Verifiers by name, and from one answer to one typed outcome, whatever a verifier does.

::

    returns a finite number, or Scored   -> Scored
    raises Reject                        -> Rejected
    raises Retry, or a lost connection   -> Failed, but another call may do better
    anything else                        -> Failed, with what was wrong; never a silent 0

A group verifier judges all answers to a prompt at once, and returns one of these for each::

    returns as many verdicts             -> an outcome of each, in their order
    returns another number of them       -> Failed, all of them; so with anything that it raises

A name with a colon in it is the import path of a user's function.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar

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
    """of the first answer; of all of them where ``others`` is empty"""
    retry_after: float | None = None
    """seconds to wait before another call, which may do better; None: it would not"""
    others: tuple[Outcome, ...] = ()
    """of the other answers to a prompt, which were judged with the first one"""

    def of_each(self, count: int) -> list[Outcome]:
        """Return the outcome of each of ``count`` answers that were judged at once."""
        return [self.outcome, *(self.others or [self.outcome] * (count - 1))]


Verdict = float | Scored
"""A reward, or one with its parts."""
Verdicts = Sequence[Verdict | Reject]
"""One for each answer to a prompt, in their order; `Reject` of one that cannot be judged."""

Verifier = (
    Callable[[Answer], Verdict]
    | Callable[[Answer], Awaitable[Verdict]]
    | Callable[[Sequence[Answer]], Verdicts]
    | Callable[[Sequence[Answer]], Awaitable[Verdicts]]
)
"""Judges one answer, or, where it is marked as a `group_verifier`, all answers to a prompt. It runs
in a process of its own: one call at a time if it is a function, and many if it is a coroutine
function (`is_asynchronous`)."""

V = TypeVar("V")
_MARK: Final = "judges_groups"


def group_verifier(verifier: V) -> V:
    """Mark a function, an object or a class of objects as a verifier that is called with all
    answers to a prompt, and returns a verdict for each."""
    setattr(verifier, _MARK, True)
    return verifier


def judges_groups(verifier: object) -> bool:
    """Whether a verifier judges all answers to a prompt at once: see `group_verifier`."""
    return getattr(verifier, _MARK, False) is True


def group_verifiers(names: Iterable[str]) -> frozenset[str]:
    """Return those of the verifiers of these names that judge all answers to a prompt at once.

    Raises as `load_verifier`.
    """
    return frozenset(one for one in set(names) - INLINE if judges_groups(load_verifier(one)))


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
    return attempt(name, verifier, [answer], finish).outcome


def attempt(
    name: str, verifier: Verifier, answers: Sequence[Answer], finish: Finish | None = None
) -> Attempt:
    """Call a verifier once, with all answers to a prompt or a single one; raises nothing but
    KeyboardInterrupt."""
    try:
        verdict = _called(verifier, answers)
        if inspect.isawaitable(verdict):
            if finish is None:
                error = f"verifier {name!r} is asynchronous and was called inline"
                return Attempt(Failed(error=error))
            verdict = finish(verdict)
        return _attempt_of(name, verifier, verdict, len(answers))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a verifier that exits has judged nothing
        return _failed_attempt(name, error)


async def attempt_beside(name: str, verifier: Verifier, answers: Sequence[Answer]) -> Attempt:
    """Call an asynchronous verifier once, beside other calls. Cancelled, it has failed."""
    try:
        return _attempt_of(name, verifier, await _called(verifier, answers), len(answers))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _failed_attempt(name, error)


def _called(verifier: Any, answers: Sequence[Answer]) -> Any:
    """What a verifier returns: a verdict, one for each answer, or something to await."""
    return verifier(list(answers) if judges_groups(verifier) else answers[0])


def _attempt_of(name: str, verifier: Verifier, verdict: Any, count: int) -> Attempt:
    if not judges_groups(verifier):
        return Attempt(outcome_of(name, verdict))
    first, *others = outcomes_of(name, verdict, count)
    return Attempt(first, others=tuple(others))


def outcomes_of(name: str, verdicts: Any, count: int) -> list[Outcome]:
    """The return value of a group verifier as outcomes of ``count`` answers, in their order.

    A list, an array, a tensor, or whatever else can be gone through and has an order.
    """
    if hasattr(verdicts, "tolist"):
        verdicts = verdicts.tolist()
    wrong = isinstance(verdicts, (str, bytes, Mapping, set, frozenset, Scored))
    found = [] if wrong or not isinstance(verdicts, Iterable) else list(verdicts)
    if wrong or not isinstance(verdicts, Iterable):
        returned = f"{cut_text(repr(verdicts), 80)} (a {type(verdicts).__name__})"
    elif len(found) != count:
        returned = "1 score" if len(found) == 1 else f"{len(found)} scores"
    else:
        return [_outcome_of_one(name, one) for one in found]
    answers = f"{count} answers" if count > 1 else "1 answer"
    error = f"verifier {name!r} returned {returned} for {answers}: return a list of {count}"
    return [Failed(error=error)] * count


def _outcome_of_one(name: str, verdict: Any) -> Outcome:
    if isinstance(verdict, Reject):
        return _rejected(verdict)
    return outcome_of(name, verdict)


def _rejected(error: Reject) -> Rejected:
    return Rejected(reason=cut_text(str(error)) or "no reason was given")


def _failed_attempt(name: str, error: BaseException) -> Attempt:
    """What an error that a verifier raised means."""
    if isinstance(error, Reject):
        return Attempt(_rejected(error))
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
        ConfigError: an import path that leads to no function of one argument.
        MissingExtra: a library that it needs is not installed.
    """
    return verifiers.load(name, path)
