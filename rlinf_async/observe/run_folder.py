"""The run folder: where a run keeps all its files.

::

    DIR/
      run.json            marks the folder as ours: how often it was started, and when
      config.toml         the configuration (config.1.toml, ...: of earlier starts, if it differed)
      metrics.csv         one row per iteration
      tensorboard/        the same for TensorBoard
      checkpoints/        what --resume goes on from
      trained/            the trained model, of a run that came to its end
      workers.log         what the workers printed, each line with its time and worker
      learning_curve.png  video.mp4  trace.json.gz  timeline.png  summary.json   written at the end

Invariant: a folder belongs to one run, and to one process at a time. A fresh run never writes into
a folder with other files, and two processes never write into one folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from rlinf_async.observe.errors import RunFolderError
from rlinf_async.observe.files import atomic_write, explaining, is_partial

MARKER = "run.json"
_LOCK = ".lock"
_CONFIG = "config.toml"


class _Marker(msgspec.Struct, kw_only=True):
    """What ``run.json`` holds. Times are seconds since 1970, UTC."""

    made_by: str = "rlinf_async"
    starts: list[float]


class RunFolder:
    """A run's folder, held by this process until `close`. Made by `RunFolder.create`."""

    def __init__(
        self, path: Path, lock: int, *, resumed: bool, made: bool, notes: Iterable[str] = ()
    ) -> None:
        self.path = path
        self._made = made
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
        lock = _take_lock(folder)
        try:
            notes = _record_start(folder, marker, config_text, resume=resume)
        except BaseException:
            os.close(lock)
            raise
        return cls(folder, lock, resumed=marker is not None, made=made, notes=notes)

    @property
    def config(self) -> Path:
        return self.path / _CONFIG

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def learning_curve(self) -> Path:
        return self.path / "learning_curve.png"

    @property
    def video(self) -> Path:
        return self.path / "video.mp4"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json.gz"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.png"

    @property
    def workers_log(self) -> Path:
        """The output of the workers; not there while they have printed nothing."""
        return self.path / "workers.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def trained(self) -> Path:
        """The trained model, of jobs that export one."""
        return self.path / "trained"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def close(self) -> None:
        """Release the folder for other processes; a second close has no effect."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove the files of a run that could not begin, and `close`; a resumed run's stay.

        The folder was empty, or not there, when it was created: all files in it are ours.
        """
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


def foreign_entries(folder: Path) -> list[str]:
    """Names in a folder without our marker that are not of a run.

    Left out are the files of a start that was killed, and empty folders: such as ``checkpoints``,
    linked to a larger disk before the run begins.
    """
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if not (entry.name == _LOCK or is_partial(entry) or _is_empty_folder(entry))
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


def _take_lock(folder: Path) -> int:
    """Lock the folder for this process; the kernel releases it however the process ends."""
    path = folder / _LOCK
    with explaining("write", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with explaining("lock", path):
            _lock_exclusively(descriptor, folder)
    except RunFolderError:
        os.close(descriptor)
        raise
    return descriptor


def _lock_exclusively(descriptor: int, folder: Path) -> None:
    try:
        # lockf, not flock: a forked worker that outlives us for a moment does not inherit it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise RunFolderError(
            f"another process is running in {folder}; wait for it or stop it, or choose another "
            "folder (--out DIR)"
        ) from error


def _record_start(
    folder: Path, marker: _Marker | None, config_text: str, *, resume: bool
) -> list[str]:
    """Write configuration and marker, and return notes for the user."""
    notes: list[str] = []
    if marker is None:
        if resume:
            notes.append(f"nothing to resume in {folder}: starting from the beginning")
        marker = _Marker(starts=[])
    marker.starts.append(time.time())
    # The marker first: a start that is killed right after it leaves a folder marked as ours.
    atomic_write(folder / MARKER, msgspec.json.format(msgspec.json.encode(marker)))
    _record_config(folder, config_text, notes)
    for name in ("tensorboard", "checkpoints"):
        with explaining("make", folder / name):
            (folder / name).mkdir(exist_ok=True)
    return notes


def _record_config(folder: Path, config_text: str, notes: list[str]) -> None:
    """Write ``config.toml``, and keep the one before under a number where it differs."""
    path = folder / _CONFIG
    with explaining("read", path):
        before = (
            path.read_text(encoding="utf-8", errors="replace") if path.exists() else config_text
        )
    if before != config_text:
        number = 1
        while (kept := folder / f"config.{number}.toml").exists():
            number += 1
        atomic_write(kept, before)
        notes.append(f"the configuration changed since the last start: the old one is {kept}")
    atomic_write(path, config_text)
