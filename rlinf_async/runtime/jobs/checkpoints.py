"""How far a run has come, and the folder of checkpoints that it goes on from.

::

    checkpoints/
      latest.json           `RunProgress`: written last, in one atomic step; names the checkpoint
      version-000010/       written by the workers; the job may add files of its own

How a checkpoint looks inside, a backend knows. `rlinf_async.backends.checkpoint.folders` needs no
torch; it is imported when it is needed, as all of a backend is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from rlinf_async.observe.errors import RunFolderError
from rlinf_async.observe.files import atomic_write

PROGRESS = "latest.json"


class RunProgress(msgspec.Struct, kw_only=True):
    """What a run has done so far. Each job adds the counts that its runs are measured by."""

    version: int = 0
    """iterations trained"""
    train_seconds: float = 0.0
    lag_sum: float = 0.0
    """sum over the iterations of their mean staleness, in versions"""
    lag_max: int = 0
    duplicates: int = 0
    """items that came a second time, and were left out"""
    checkpoint: str = ""
    """folder, relative to that of the checkpoints"""

    @property
    def lag_mean(self) -> float:
        return self.lag_sum / self.version if self.version else 0.0

    def at(self, checkpoint: str) -> bytes:
        """The content of ``latest.json`` for this moment, once this checkpoint is complete.

        Args:
            checkpoint: its folder, or the name of it.
        """
        return msgspec.json.encode(msgspec.structs.replace(self, checkpoint=Path(checkpoint).name))


AnyProgress = TypeVar("AnyProgress", bound=RunProgress)


def load_progress(
    checkpoints: Path, kind: type[AnyProgress], *, file: str = ""
) -> AnyProgress | None:
    """Where to go on; None where there is no checkpoint.

    Args:
        checkpoints: the folder of the checkpoints.
        kind: the job's own progress.
        file: that a checkpoint of this job has to contain.

    Raises:
        RunFolderError: ``latest.json``, or the checkpoint that it names, is damaged or missing.
    """
    latest = checkpoints / PROGRESS
    if not latest.exists():
        return None
    try:
        progress = msgspec.json.decode(latest.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise RunFolderError(f"{latest} cannot be read: {error}") from error
    if not (checkpoints / progress.checkpoint / file).exists():
        lacks = f" or has no {file}" if file else ""
        raise RunFolderError(
            f"{latest} names the checkpoint {progress.checkpoint!r}, which is not there{lacks}: "
            "restore it, or start again in another folder"
        )
    return progress


async def make_latest(
    checkpoints: Path,
    checkpoint: str,
    progress: bytes,
    count: int,
    *,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Make this checkpoint the one to go on from; keep ``count - 1`` of those before it.

    Args:
        checkpoints: the folder of the checkpoints.
        checkpoint: its folder, or the name of it: complete, as its workers say.
        progress: `RunProgress.at` the moment that the checkpoint is of.
        count: checkpoints to keep.
        files: what the job adds to the checkpoint, by name.

    Raises:
        RunFolderError: it is not complete, or cannot be written.
    """
    name = Path(checkpoint).name

    def write() -> None:
        _check_complete(checkpoints / name)
        for file, content in (files or {}).items():
            atomic_write(checkpoints / name / file, content)
        atomic_write(checkpoints / PROGRESS, progress)
        _keep_newest(checkpoints, name, count)

    await asyncio.to_thread(write)  # it waits for the disk, and removes gigabytes


def folder_of(version: int) -> str:
    """Return the name of a version's checkpoint; names sort as versions do."""
    return f"version-{version:06d}"


def clean(checkpoints: Path) -> None:
    """Remove what a killed run has left half-written. For the start of a run."""
    from rlinf_async.backends.checkpoint import folders

    folders.clean(checkpoints)


def sibling(path: Path) -> Path:
    """Return where a part of a checkpoint is written that moves into it once it is complete."""
    return path.with_name(f".{path.name}.beside")


def _keep_newest(checkpoints: Path, newest: str, count: int) -> None:
    """Older ones go, unless they are being read. Later ones are left alone: they may be on their
    way to become the newest."""
    from rlinf_async.backends.checkpoint import folders

    folders.keep_newest(checkpoints, newest, count)


def _check_complete(checkpoint: Path) -> None:
    """Raise `RunFolderError` unless the folder has its final name.

    It has not where every rank has written, but not all to the disk that this process sees.
    """
    from rlinf_async.backends.checkpoint import folders

    if not checkpoint.is_dir() or folders.staging_folder(checkpoint).exists():
        raise RunFolderError(
            f"{checkpoint} is not complete though every actor has written its part: not all write "
            "to the same disk as this process; put the run's folder on a disk that they share"
        )
