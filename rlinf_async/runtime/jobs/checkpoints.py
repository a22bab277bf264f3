"""What both jobs do with their folder of checkpoints; how a checkpoint looks, a backend knows.

`rlinf_async.backends.checkpoint.folders` needs no torch; it is imported when it is needed, as all
of a backend is.
"""

from __future__ import annotations

from pathlib import Path


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


def beside(path: Path) -> Path:
    """Return where something that belongs into a checkpoint is written while that is written."""
    return path.with_name(f".{path.name}.beside")
