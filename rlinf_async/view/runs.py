"""The runs that the page shows, and what can be said of each.

A folder that is named is a run, or holds runs: those are shown that come later, too. What is wrong
with the files of a run stands beside its name, by the file at fault, and hides neither its other
files nor other runs.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from rlinf_async.config import UsageError
from rlinf_async.observe.files import RunFolderError, explaining
from rlinf_async.observe.progress import ProgressState
from rlinf_async.observe.run_folder import MARKER, RUNS, STATUS, check_is_run
from rlinf_async.observe.status import RunState, look_at_run
from rlinf_async.view.graph import NewestWaits
from rlinf_async.view.kept import KeptSamples, newest_segment
from rlinf_async.view.table import Table

LOOK_EVERY: Final = 2.0
"""seconds between two looks for new runs below a folder"""
LATE: Final = 10.0
"""seconds after which a run that goes on is late with its status"""
FILES: Final = {
    "config": "config.toml",
    "trace": "trace.json.gz",
    "status": STATUS,
    "summary": "summary.json",
    "waits": "waits.jsonl",
    "video": "video.mp4",
}
"""what the page reads of a run, by the part of it that shows it"""


class _Starts(msgspec.Struct):
    starts: list[float] = []


class Run:
    """A run that is shown.

    Args:
        number: what requests name it by.
        folder: its folder, which may be gone at any time.
        name: what it is called, unlike all others.
    """

    def __init__(self, number: int, folder: Path, name: str) -> None:
        self.number = number
        self.folder = folder
        self.name = name
        self.table = Table(folder / "metrics.csv")
        self.samples = KeptSamples(folder)
        self.waits = NewestWaits(folder)
        self.lock = threading.Lock()
        """held while its table is read"""

    def state(self) -> dict[str, Any]:
        """What is known of the run now: it never raises for what is wrong with its files."""
        problems: dict[str, str] = {}
        seen = self._seen(problems)
        with self.lock:
            with _noting(problems, "metrics"):
                self.table.read()
            metrics = {
                "generation": self.table.generation,
                "rows": self.table.rows,
                "columns": self.table.newest(),
            }
        shown = seen.status.shown if seen is not None and seen.status is not None else None
        return {
            "id": self.number,
            "name": self.name,
            "folder": str(self.folder),
            "starts": self._starts(),
            "problems": problems,
            "metrics": metrics,
            "stamps": self._stamps(),
            "iteration": shown.iteration if shown else None,
            "iterations": shown.iterations if shown else None,
            "figures": list(shown.figures) if shown else [],
            "note": shown.note if shown else "",
            **self._described(seen),
        }

    def _seen(self, problems: dict[str, str]) -> RunState | None:
        with _noting(problems, "run"):
            return look_at_run(self.folder)
        return None

    def _described(self, seen: RunState | None) -> dict[str, Any]:
        """The state of the run in words, and since how many seconds it is so."""
        if seen is None:
            gone = not self.folder.exists()
            return {"state": "deleted" if gone else "unreadable", "live": False, "ago": None}
        live = seen.state in ("starting", "running", "ending")
        if seen.state != "ended":
            ago = seen.seconds_ago
            if live and ago is not None and ago <= LATE:
                ago = None  # it is seen just now
            return {"state": seen.state, "live": live, "ago": ago}
        if seen.result is None:
            return {"state": "no result", "live": False, "ago": self._age("metrics.csv", MARKER)}
        return {
            "state": seen.result.outcome,
            "live": False,
            "ago": self._age("summary.json"),
            "error": seen.result.error,
            "seconds": seen.result.train_seconds,
            "iteration": seen.result.iterations,
        }

    def _age(self, *names: str) -> float | None:
        """Seconds since the first of these files that is there was written."""
        for name in names:
            with contextlib.suppress(OSError):
                return max(0.0, time.time() - (self.folder / name).stat().st_mtime)
        return None

    def _starts(self) -> int:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            marker = (self.folder / MARKER).read_bytes()
            return len(msgspec.json.decode(marker, type=_Starts).starts)
        return 0

    def _stamps(self) -> dict[str, str]:
        """When each file was written, so that the page asks for it again; those that are there."""
        stamps: dict[str, str] = {}
        paths = {part: self.folder / name for part, name in FILES.items()}
        with contextlib.suppress(OSError):
            if (newest := newest_segment(self.folder)) is not None:
                paths["samples"] = newest
        for part, path in paths.items():
            with contextlib.suppress(OSError):
                found = path.stat()
                stamps[part] = f"{found.st_mtime_ns:x}-{found.st_size:x}"
        return stamps

    def shown(self) -> ProgressState | None:
        """What the live view of the run shows, while it goes on or where it was killed.

        Raises:
            RunFolderError: its folder cannot be read.
        """
        status = look_at_run(self.folder).status
        return None if status is None else status.shown

    def settings(self) -> dict[str, Any]:
        """The configuration as text and by dotted name, and those of earlier starts.

        Raises:
            RunFolderError: it cannot be read, or is not TOML.
        """
        path = self.folder / "config.toml"
        text = _text_of(path)
        earlier: list[dict[str, Any]] = []
        for number in range(1, 1000):
            before = self.folder / f"config.{number}.toml"
            if not before.exists():
                break
            try:
                earlier.append({"name": before.name, "values": _values(before, _text_of(before))})
            except RunFolderError as error:
                earlier.append({"name": before.name, "error": str(error)})
        return {"text": text, "values": _values(path, text), "earlier": earlier}

    def videos(self) -> list[str]:
        """The names of the videos in the folder.

        Raises:
            RunFolderError: it cannot be read.
        """
        with explaining("read", self.folder):
            found = sorted(self.folder.glob("*.mp4"), key=lambda one: _natural(one.name))
            inside = self.folder.resolve()
            return [
                one.name
                for one in found
                if one.is_file() and one.resolve().is_relative_to(inside)
                and not one.name.startswith(".")
            ]  # fmt: skip


class Runs:
    """All runs that are shown.

    Args:
        named: folders of runs, or that hold runs; none: those below ``runs``.

    Raises:
        UsageError: a folder is none of both.
    """

    def __init__(self, named: Sequence[Path]) -> None:
        self._single: list[Path] = []
        self._parents: list[Path] = []
        self._runs: dict[Path, Run] = {}
        self._lock = threading.Lock()
        self._look_at = 0.0
        for path in named or [RUNS]:
            folder = path.expanduser().absolute()
            if _is_run(folder):
                self._single.append(folder)
            elif _below(folder):
                self._parents.append(folder)
            else:
                raise UsageError(_no_run(folder, named=bool(named)))
        self.all()

    def all(self) -> list[Run]:
        """Every run that is or was there, in the order in which they were found."""
        with self._lock:
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + LOOK_EVERY
                for folder in (
                    *self._single,
                    *(one for all in self._parents for one in _below(all)),
                ):
                    if folder not in self._runs:
                        self._runs[folder] = Run(len(self._runs), folder, self._name(folder))
            return list(self._runs.values())

    def look_again(self) -> None:
        """Look for new runs the next time, however short ago that was done."""
        self._look_at = 0.0

    def of(self, number: int) -> Run:
        """The run of a number.

        Raises:
            KeyError: there is none.
        """
        for run in self.all():
            if run.number == number:
                return run
        raise KeyError(number)

    def _name(self, folder: Path) -> str:
        """The shortest end of its path that no other run has."""
        taken = {run.name for run in self._runs.values()}
        for length in range(1, len(folder.parts)):
            name = "/".join(folder.parts[-length:])
            if name not in taken:
                return name
        return str(folder)


@contextlib.contextmanager
def _noting(problems: dict[str, str], part: str) -> Iterator[None]:
    """Note what is wrong with a file of the run."""
    try:
        yield
    except RunFolderError as error:
        problems[part] = str(error)
    except OSError as error:
        problems[part] = f"{error.filename}: {error.strerror}"


def _is_run(folder: Path) -> bool:
    try:
        check_is_run(folder)
    except (RunFolderError, OSError):
        return False
    return True


def _below(folder: Path) -> list[Path]:
    """The runs in a folder, by name."""
    try:
        inside = sorted(folder.iterdir(), key=lambda one: _natural(one.name))
    except OSError:
        return []
    return [one for one in inside if _is_run(one)]


def _no_run(folder: Path, *, named: bool) -> str:
    if not named:
        return f"there is no run below {folder}; name the folder of one, or one that holds runs"
    if not folder.exists():
        return f"{folder}: there is no such folder; name that of a run, or one that holds runs"
    return (
        f"{folder} is neither the folder of a run (it has no {MARKER} of one) nor holds any; "
        "name one that rlinf-async train has made"
    )


def _text_of(path: Path) -> str:
    with explaining("read", path):
        return path.read_text(encoding="utf-8", errors="replace")


def _values(path: Path, text: str) -> dict[str, str]:
    """The settings of a TOML file by dotted name, as text."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RunFolderError(f"{path} is not TOML: {error}") from error
    return dict(_flat(tables, ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and (value or not name):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else key)
    else:
        yield name, _written(value)


def _written(value: Any) -> str:
    """A value of TOML as text; a large integer with all of its digits."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return repr(value)


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders ``run 10`` after ``run 9``."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
