"""What a run came to: ``summary.json``, and the last line that a run prints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import msgspec

from rlinf_async.observe.errors import RunFolderError
from rlinf_async.observe.files import atomic_write, explaining
from rlinf_async.observe.run_folder import RunFolder

Detail = str | int | float | bool | None


class Staleness(msgspec.Struct, kw_only=True, frozen=True):
    """How many weight versions behind the samples were that the actor trained on."""

    mean: float
    max: int
    allowed: int


class Summary(msgspec.Struct, kw_only=True, rename={"return_": "return"}):
    """The result of a run. A number that was not measured is None (``null``), never 0."""

    run: str
    outcome: Literal["succeeded", "fell short", "finished", "stopped", "failed"]
    """``succeeded`` and ``fell short`` where the run had a target, ``finished`` where not."""
    seed: int
    iterations: int
    env_steps: int
    train_seconds: float
    """Training alone: without start, evaluation and what is written at the end."""
    steps_per_second: float | None = None
    success_rate: float | None = None
    """Of the evaluation at the end, 0 to 1."""
    return_: float | None = None
    """Mean episode return of the evaluation at the end."""
    evaluation_episodes: int | None = None
    staleness: Staleness | None = None
    restarts: dict[str, int] = {}
    """By worker."""
    dropped: dict[str, int] = {}
    """What was left out or came twice, by kind: stale answers, second trajectories, spans."""
    error: str | None = None
    """The first cause, where the run failed."""
    extra: dict[str, Detail] = {}


def write_summary(path: Path, summary: Summary) -> None:
    """Write ``summary.json``; what is not a finite number is written as null.

    Raises:
        RunFolderError: the file could not be written.
    """
    atomic_write(path, msgspec.json.format(msgspec.json.encode(summary)) + b"\n")


def read_summary(path: Path) -> Summary:
    """Read ``summary.json``.

    Raises:
        RunFolderError: the file cannot be read, or is not a summary.
    """
    with explaining("read", path):
        content = path.read_bytes()
    try:
        return msgspec.json.decode(content, type=Summary)
    except msgspec.DecodeError as error:
        raise RunFolderError(f"{path} is not the summary of a run: {error}") from error


def last_line(folder: RunFolder, summary: Summary) -> str:
    """What came of the run, and where the things are that it left: one line."""
    left = (
        folder.summary,
        folder.metrics,
        folder.learning_curve,
        folder.video,
        folder.trace,
        folder.timeline,
        folder.checkpoints,
    )
    names = [path.name + "/" * path.is_dir() for path in left if _holds_something(path)]
    what = ", ".join(names) or "nothing was written"
    return f"{summary.run} {_result(summary)} -> {folder.path} ({what})"


def _result(summary: Summary) -> str:
    parts = []
    if summary.success_rate is not None:
        parts.append(f"success rate {summary.success_rate:.2f}")
    if summary.return_ is not None and math.isfinite(summary.return_):
        parts.append(f"return {summary.return_:.2f}")
    parts.append(f"{summary.train_seconds:.1f} s of training")
    parts.append(f"{summary.env_steps:,} steps")
    if summary.steps_per_second is not None:
        parts.append(f"{summary.steps_per_second:,.0f} steps/s")
    return f"{summary.outcome}: {', '.join(parts)}"


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.is_file()
