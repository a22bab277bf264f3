"""The state of a run as another process sees it: the lock of its folder, and ``status.json``.

The live view writes what it shows into the folder, about once a second; `look_at_run` reads it, and
says whether the run still goes on.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from rlinf_async.observe.files import RunFolderError, atomic_write, explaining
from rlinf_async.observe.progress import ProgressState
from rlinf_async.observe.run_folder import STATUS, check_is_run
from rlinf_async.observe.run_lock import LockState, look_at_lock

T = TypeVar("T")


class Status(msgspec.Struct, kw_only=True):
    """Contents of ``status.json``."""

    time: float
    """time of writing, in seconds since 1970, UTC"""
    ending: bool
    """whether the run ends, by a signal or because it is done"""
    grace_seconds: float
    """seconds from a SIGTERM to the end of the run, at most"""
    shown: ProgressState


class RunResult(msgspec.Struct, kw_only=True):
    """The part of ``summary.json`` that is the same for every job."""

    outcome: str
    iterations: int
    train_seconds: float
    error: str | None = None
    reached: str | None = None


class RunState(msgspec.Struct, kw_only=True):
    """State of a run, as far as its folder tells."""

    folder: str
    state: Literal["starting", "running", "ending", "ended", "killed"]
    host: str | None = None
    """host of the process that runs it, or that was killed"""
    pid: int | None = None
    """process id on that host"""
    here: bool = False
    """whether that is this host"""
    seconds_ago: float | None = None
    """age of the status"""
    status: Status | None = None
    """status while the run goes on, or when it was killed"""
    result: RunResult | None = None
    """result of a run that has ended"""


def write_status(path: Path, status: Status) -> None:
    """Replace ``status.json``, if that can be done: a run does not depend on it."""
    with contextlib.suppress(RunFolderError):
        atomic_write(path, msgspec.json.encode(status), durable=False)


def look_at_run(folder: Path) -> RunState:
    """The state of the run in a folder, now.

    Raises:
        RunFolderError: it is not a run's folder, or cannot be read.
    """
    check_is_run(folder)
    status = _read(folder / STATUS, Status)  # before the lock, which says whether it holds
    return state_of(folder, look_at_lock(folder), status, time.time())


def state_of(folder: Path, lock: LockState, status: Status | None, now: float) -> RunState:
    """Return what the lock of a run and its status mean together."""
    holder = lock.holder
    if not lock.held and holder is None:
        return RunState(
            folder=str(folder),
            state="ended",
            result=_read(folder / "summary.json", RunResult),
        )
    state: Literal["starting", "running", "ending", "killed"] = "running"
    if not lock.held:
        state = "killed"
    elif status is None:
        state = "starting"
    elif status.ending:
        state = "ending"
    return RunState(
        folder=str(folder),
        state=state,
        host=holder.host if holder else None,
        pid=holder.pid if holder else None,
        here=holder.is_here if holder else False,
        seconds_ago=None if status is None else max(0.0, now - status.time),
        status=status,
    )


def _read(path: Path, kind: type[T]) -> T | None:
    """What a file of a run holds; None where it is not there.

    Raises:
        RunFolderError: it cannot be read, or is of another version.
    """
    with explaining("read", path):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise RunFolderError(
            f"{path} cannot be read: {error}; was it written by another version of rlinf_async?"
        ) from error
