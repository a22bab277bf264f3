"""The run folder: where a run keeps all its files.

::

    DIR/
      run.json            marks the folder as ours: how often it was started, and when
      config.toml         the configuration (config.1.toml, ...: of earlier starts, if it differed)
      inputs.json         digests of the files that were read, versions of packages
      metrics.csv         one row per iteration
      waits.jsonl         who waited for whom: a record an iteration
      tensorboard/        the same for TensorBoard
      checkpoints/        what --resume goes on from
      trained/            the trained model, of a run that came to its end
      teacher/            earlier versions of the policy, where they are its teachers
      recording/          what passed its channels, for each start: see `rlinf_async.recording`
      samples/            what the model said, and what it got for it; see `observe.samples`
      workers.log         what the workers printed, each line with its time and worker
      status.json         what the live view shows, while the run goes on
      sinks/              what metrics sinks keep: their ids of the run, databases, logs
      .lock               held by the process of the run, and says which that is
      learning_curve.png  video.mp4  trace.json.gz  timeline.png  summary.json   written at the end

Invariant: a folder belongs to one run, and to one process at a time. A fresh run never writes into
a folder with other files, and two processes never write into one folder.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from rlinf_async.observe.files import RunFolderError, atomic_write, explaining, is_partial
from rlinf_async.observe.run_lock import LOCK, release_lock, take_lock

RUNS = Path("runs")
"""where runs are whose folder was not named"""
MARKER = "run.json"
STATUS = "status.json"
_CONFIG = "config.toml"
_SUMMARY = "summary.json"


class _Marker(msgspec.Struct, kw_only=True):
    """Contents of ``run.json``. Times are seconds since 1970, UTC."""

    made_by: str = "rlinf_async"
    starts: list[float]


class _Worker(msgspec.Struct):
    name: str
    restarts: int = 0


class _Shown(msgspec.Struct):
    workers: list[_Worker] = []


class _Counted(msgspec.Struct):
    """The part of ``status.json``, and of ``summary.json``, that counts restarts."""

    shown: _Shown | None = None
    restarts: dict[str, int] = {}


class RunFolder:
    """A run's folder, held by this process until `close`. Made by `RunFolder.create`."""

    def __init__(
        self,
        path: Path,
        lock: int,
        *,
        resumed: bool,
        made: bool,
        replaced: Path | None = None,
        start: int = 1,
        notes: Iterable[str] = (),
        restarts: Mapping[str, int] | None = None,
    ) -> None:
        self.path = path
        self.config = path / _CONFIG
        self.metrics = path / "metrics.csv"
        self.tensorboard = path / "tensorboard"
        self.learning_curve = path / "learning_curve.png"
        self.video = path / "video.mp4"
        self.trace = path / "trace.json.gz"
        self.timeline = path / "timeline.png"
        self.workers_log = path / "workers.log"
        """The output of the workers; not there while they have printed nothing."""
        self.checkpoints = path / "checkpoints"
        self.trained = path / "trained"
        """The trained model, of jobs that export one."""
        self.summary = path / _SUMMARY
        self.status = path / STATUS
        """What the live view shows, while the run goes on."""
        self.recording = path / "recording" / str(start)
        """What this start records of its channels."""
        self.restarts_before = dict(restarts or {})
        """Restarts of workers in earlier starts of this run, by worker."""
        self.waits = path / "waits.jsonl"
        """Who waited for whom, a record an iteration."""
        self.start = start
        """Number of this start of the run: the first is 1."""
        self._made = made
        self._replaced = replaced
        """Where the configuration of the start before is kept, if this one has another."""
        self.resumed = resumed
        """Whether the folder has files of an earlier start of this run."""
        self.notes = tuple(notes)
        """Messages for the user about how the folder was opened."""
        self._lock: int | None = lock

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], *, config_text: str, resume: bool = False
    ) -> RunFolder:
        """Make the folder, or with ``resume`` open an existing one; record the configuration.

        With ``resume``, a folder that is absent or empty starts a fresh run and a note says so: a
        run that was killed before it had written anything is started again by the same command.

        Raises:
            RunFolderError: the folder holds something else, or a run and ``resume`` is False, or a
                run that is still going on; or the disk is full or not writable.
        """
        folder = Path(path).expanduser().absolute()
        made = not folder.exists()
        with explaining("make the run folder", folder):
            folder.mkdir(parents=True, exist_ok=True)
        marker = _read_marker(folder, resume=resume)
        lock = take_lock(folder)
        try:
            restarts = {} if marker is None else _restarts_before(folder)
            _remove_status(folder)
            replaced, notes = _record_start(folder, marker, config_text, resume=resume)
        except BaseException:
            release_lock(lock)
            raise
        return cls(
            folder,
            lock,
            resumed=marker is not None,
            made=made,
            replaced=replaced,
            start=1 if marker is None else len(marker.starts),
            notes=notes,
            restarts=restarts,
        )

    def close(self) -> None:
        """Release the folder for other processes; a second close has no effect."""
        if self._lock is not None:
            _remove_status(self.path)
            release_lock(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove the files of a run that could not begin, and `close`.

        A resumed run's files stay, with the configuration that it had. Any other folder was empty,
        or not there, when it was created: all files in it are ours.
        """
        if self._replaced is not None:
            with contextlib.suppress(OSError):
                self._replaced.replace(self.config)
        if not self.resumed:
            with contextlib.suppress(OSError):
                for entry in list(self.path.iterdir()):
                    if entry.is_dir() and not entry.is_symlink():
                        shutil.rmtree(entry)
                    else:
                        entry.unlink()
                if self._made:
                    self.path.rmdir()
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _read_marker(folder: Path, *, resume: bool) -> _Marker | None:
    """The marker of the run in the folder, None where it is empty; refuses other folders."""
    with explaining("read the run folder", folder):
        marker = folder / MARKER
        if not marker.exists():
            _refuse_foreign(folder)
            return None
        content = marker.read_bytes()
    try:
        known = msgspec.json.decode(content, type=_Marker)
    except msgspec.DecodeError as error:
        raise RunFolderError(
            f"{marker} is not the marker of a rlinf_async run ({error}); choose another folder"
        ) from error
    if not resume:
        raise RunFolderError(
            f"{folder} already holds a run; go on with it (--resume), choose another folder "
            "(--out DIR), or remove it"
        )
    return known


def newest_run(runs: Path = RUNS) -> Path | None:
    """The run below this folder that was started last; None where there is none."""
    folders = sorted(runs.iterdir()) if runs.is_dir() else []
    found = ((_marker_of(path), path) for path in folders)
    starts = [(marker.starts[-1:], path) for marker, path in found if marker is not None]
    return max(starts)[1] if starts else None


def check_is_run(folder: Path) -> None:
    """Raise `RunFolderError` for a folder that is not there, or not of a run."""
    if not folder.exists():
        raise RunFolderError(f"{folder}: there is no such folder; name that of a run")
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is a file; name the folder of a run")
    if _marker_of(folder) is None:
        raise RunFolderError(
            f"{folder} is not the folder of a run (it has no {MARKER} of one); name one that "
            "rlinf-async train has made"
        )


def _marker_of(folder: Path) -> _Marker | None:
    """The marker of a folder that may be anything; None where it is not of a run."""
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=_Marker)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def _restarts_before(folder: Path) -> dict[str, int]:
    """What earlier starts have counted: in a summary, and in the status of one that was killed."""
    before: dict[str, int] = {}
    for name in (_SUMMARY, STATUS):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found = msgspec.json.decode((folder / name).read_bytes(), type=_Counted)
            before |= found.restarts
            shown = found.shown.workers if found.shown else []
            before |= {one.name: one.restarts for one in shown if one.restarts}
    return before


def _remove_status(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / STATUS).unlink(missing_ok=True)


def foreign_entries(folder: Path) -> list[str]:
    """Names in a folder without our marker that are not of a run.

    Left out are the files of a start that was killed, and empty folders: such as ``checkpoints``,
    linked to a larger disk before the run begins.
    """
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if not (entry.name == LOCK or is_partial(entry) or _is_empty_folder(entry))
    )


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _refuse_foreign(folder: Path) -> None:
    foreign = foreign_entries(folder)
    if foreign:
        raise RunFolderError(
            f"{folder} is not empty and not a run folder (it holds {foreign[0]!r}"
            f"{f' and {len(foreign) - 1} more' if len(foreign) > 1 else ''}); "
            "choose an empty or a new folder (--out DIR)"
        )


def _record_start(
    folder: Path, marker: _Marker | None, config_text: str, *, resume: bool
) -> tuple[Path | None, list[str]]:
    """Write configuration and marker.

    Returns where the configuration before is kept, if it differs, and notes on what is unusual.
    """
    notes: list[str] = []
    if marker is None:
        if resume:
            notes.append(f"nothing to resume in {folder}: starting from the beginning")
        marker = _Marker(starts=[])
    marker.starts.append(time.time())
    # The marker first: a start that is killed right after it leaves a folder marked as ours.
    atomic_write(folder / MARKER, msgspec.json.format(msgspec.json.encode(marker)))
    replaced = _record_config(folder, config_text)
    if replaced is not None:
        notes.append(f"the configuration changed since the last start: the old one is {replaced}")
    for name in ("tensorboard", "checkpoints"):
        with explaining("make", folder / name):
            (folder / name).mkdir(exist_ok=True)
    return replaced, notes


def _record_config(folder: Path, config_text: str) -> Path | None:
    """Write ``config.toml``; where the one before differs, it is kept under this number."""
    path = folder / _CONFIG
    kept: Path | None = None
    with explaining("read", path):
        before = (
            path.read_text(encoding="utf-8", errors="replace") if path.exists() else config_text
        )
    if before != config_text:
        numbered = (folder / f"config.{number}.toml" for number in itertools.count(1))
        kept = next(one for one in numbered if not one.exists())
        atomic_write(kept, before)
    atomic_write(path, config_text)
    return kept
