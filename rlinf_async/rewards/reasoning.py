"""``reasoning_gym``: the task's own scoring, between 0 and 1.

Scoring may depend on all of a task's entry, which can hold what JSON cannot (tuples, numbers as
keys). So the reference names the task and has the entry as a Python literal. An entry that is not
one (in two of some hundred tasks) is generated again, from seed and index, and its question is
compared.
"""

from __future__ import annotations

import ast
import warnings
from functools import lru_cache
from typing import Any

import msgspec

from rlinf_async.config import ConfigError, needed
from rlinf_async.config.registry import nearest
from rlinf_async.rewards.judging import Answer, Reject


class TaskReference(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``Prompt.reference`` of such a task, as JSON."""

    task: str
    options: dict[str, Any] = {}
    """options of the task"""
    seed: int
    size: int
    index: int
    question: str
    entry: str = ""
    """entry as a Python literal; empty where it is not one and has to be generated again"""


def score(answer: Answer) -> float:
    """Return the task's score of the text in the last ``<answer>`` tags, or of the whole answer
    without such tags."""
    try:
        about = msgspec.json.decode(answer.reference, type=TaskReference)
    except msgspec.DecodeError as error:
        raise Reject(f"the reference is not one of a reasoning-gym task: {error}") from error
    options = msgspec.json.encode(about.options, order="sorted")
    task = _cached_task(about.task, options, about.seed, about.size)
    entry = ast.literal_eval(about.entry) if about.entry else task[about.index]
    if entry["question"] != about.question:
        raise Reject(
            f"task {about.task!r} makes another question of seed {about.seed} and index "
            f"{about.index} in this process: it depends on PYTHONHASHSEED; set it to 0"
        )
    tagged = imported("reasoning_gym.utils").extract_answer(answer.text)
    found = answer.text.strip() if tagged is None else tagged
    return float(task.score_answer(answer=found, entry=entry))


def reference_of(
    entry: dict[str, Any], task: str, options: dict[str, Any], seed: int, size: int, index: int
) -> str:
    """The entry as the reference of a `Prompt`."""
    about = TaskReference(
        task=task,
        options=options,
        seed=seed,
        size=size,
        index=index,
        question=entry["question"],
        entry=_as_literal(entry),
    )
    return msgspec.json.encode(about).decode()


def open_task(name: str, options: dict[str, Any], seed: int, size: int) -> Any:
    """The task: entry ``i`` is ``task[i]``, the same for the same seed.

    Raises:
        MissingExtra: reasoning-gym is not installed.
        ConfigError: no such task, or options that it does not take.
    """
    library = imported("reasoning_gym")
    known = imported("reasoning_gym.factory").DATASETS
    if name not in known:
        raise ConfigError(
            f"reasoning-gym has no task {name!r}{nearest(name, known)}; its "
            f"{len(known)} tasks are listed by reasoning_gym.factory.DATASETS",
            path=("tasks",),
        )
    try:
        return library.create_dataset(name, **{**options, "seed": seed, "size": size})
    except Exception as error:  # a task checks its options by assert, TypeError, ValueError, ...
        raise ConfigError(
            f"task {name!r} with {options}: {error}", path=("task_options",)
        ) from error


@lru_cache(maxsize=64)
def _cached_task(name: str, options: bytes, seed: int, size: int) -> Any:
    return open_task(name, msgspec.json.decode(options), seed, size)


def _as_literal(entry: dict[str, Any]) -> str:
    text = repr(entry)
    try:
        return text if ast.literal_eval(text) == entry else ""
    except (ValueError, SyntaxError):
        return ""


def imported(module: str) -> Any:
    """A module of reasoning-gym.

    Without the syntax warnings of its dependencies, which appear where there is no bytecode yet.

    Raises:
        MissingExtra: reasoning-gym is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return needed(module, extra="llm", needed_for="reasoning-gym")


imported("reasoning_gym")  # who loads the verifier hears at once that it is not installed
