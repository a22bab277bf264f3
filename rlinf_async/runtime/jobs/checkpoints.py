"""What both jobs do with their folder of checkpoints; how a checkpoint looks, a backend knows.

`rlinf_async.backends.checkpoint.folders` needs no torch; it is imported when it is needed, as all
of a backend is.
"""

from __future__ import annotations

from pathlib import Path

from rlinf_async.observe.errors import RunFolderError


def folder_of(version: int) -> str:
    """Return the name of a version's checkpoint; names sort as versions do."""
    return f"version-{version:06d}"


def clean(checkpoints: Path) -> None:
    """Remove what a killed run has left half-written. For the start of a run."""
    from rlinf_async.backends.checkpoint import folders

    folders.clean(checkpoints)


def keep_newest(checkpoints: Path, newest: str, count: int) -> None:
    """Keep ``newest`` and the ``count - 1`` before it; older ones go, unless they are being read.

    Later ones are left alone: they may be on their way to become the newest.
    """
    from rlinf_async.backends.checkpoint import folders

    folders.keep_newest(checkpoints, newest, count)


def check_complete(checkpoint: Path) -> None:
    """Raise `RunFolderError` unless the folder has its name: a run must not be told to go on there.

    It is still missing where every rank has written, but not all to the disk that this process
    sees.
    """
    from rlinf_async.backends.checkpoint import folders

    if not checkpoint.is_dir() or folders.staging_folder(checkpoint).exists():
        raise RunFolderError(
            f"{checkpoint} is not complete though every actor has written its part: not all write "
            "to the same disk as this process; put the run's folder on a disk that they share"
        )


def beside(path: Path) -> Path:
    """Return where something that belongs into a checkpoint is written while that is written."""
    return path.with_name(f".{path.name}.beside")
