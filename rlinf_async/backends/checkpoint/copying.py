"""Copies of the other files in a checkpoint's or run's folder, flushed to the disk.

Links stay links to their targets. Only files, folders and links are copied.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from rlinf_async.backends.checkpoint.folders import sync
from rlinf_async.backends.checkpoint.metadata import FileRecord
from rlinf_async.backends.checkpoint.streaming import Advance
from rlinf_async.backends.checkpoint.tensor_file import CHUNK_BYTES, ChecksummedFile


def copy_file(source: Path, target: Path, name: str) -> FileRecord:
    """Copy a file from one folder to another, under the same name; return its record."""
    with (source / name).open("rb") as read, ChecksummedFile(target, name) as file:
        while chunk := read.read(CHUNK_BYTES):
            file.write(chunk)
    return file.record


class Copies:
    """Copies of the contents of a folder. `write` makes them; ``total_bytes`` is known before.

    Args:
        folder: the source.
        names: files and folders in it; folders are copied with their contents.
    """

    def __init__(self, folder: Path, names: Collection[str]) -> None:
        self._folder = folder
        self.names = tuple(sorted(names))
        self._found = [one for name in self.names for one in _within(folder, Path(name))]
        self.total_bytes = sum(
            (folder / one).stat().st_size for one in self._found if _is_plain(folder / one)
        )

    def write(self, target: Path, advance: Advance) -> None:
        """Copy them into ``target``, which has none of them."""
        folders: list[Path] = []
        for one in self._found:
            source = self._folder / one
            if source.is_symlink():
                (target / one).symlink_to(source.parent.resolve() / os.readlink(source))
            elif source.is_dir():
                (target / one).mkdir()
                folders.append(target / one)
            elif source.is_file():
                advance(copy_file(self._folder, target, str(one)).size)
        for folder in folders:
            sync(folder)


def visible(folder: Path) -> list[str]:
    """Return the names in a folder, without hidden ones: staging folders, locks."""
    return sorted(one.name for one in folder.iterdir() if not one.name.startswith("."))


def _within(folder: Path, one: Path) -> Iterator[Path]:
    """``one`` and, where it is a folder, everything in it: outer ones first."""
    yield one
    if (folder / one).is_dir() and not (folder / one).is_symlink():
        for inner in sorted((folder / one).iterdir()):
            yield from _within(folder, one / inner.name)


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
