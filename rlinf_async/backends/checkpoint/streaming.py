"""New folders, written without more than one tensor in memory: files of tensors, and copies of the
other files of a checkpoint or run, flushed to the disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from rlinf_async.backends.checkpoint.folders import (
    CheckpointError,
    FileRecord,
    staging_folder,
    sync,
)
from rlinf_async.backends.checkpoint.tensor_file import CHUNK_BYTES, ChecksummedFile, TensorEntry

Advance: TypeAlias = Callable[[int], None]
"""callback for progress, with the number of bytes written since the last call"""


def write_tensors(
    folder: Path,
    name: str,
    head: bytes,
    entries: Sequence[TensorEntry],
    make: Callable[[TensorEntry], Tensor],
    advance: Advance,
) -> FileRecord:
    """Write a file of tensors in their order; ``make`` returns each, on the CPU."""
    with ChecksummedFile(folder, name) as file:
        file.write(head)
        for one in entries:
            tensor = make(one).contiguous().reshape(-1)
            file.write(tensor.view(torch.uint8).numpy().data)
            del tensor  # before the next one is made
            advance(one.nbytes)
    return file.record


def check_new(out: Path) -> None:
    """Raise `CheckpointError` if ``out`` exists."""
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists already: name another folder, or move it away")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Make a folder to write into; it is renamed to ``out`` at the end of the block.

    Raises `CheckpointError` if ``out`` exists, or another process of this host is writing it. After
    an error nothing is left.
    """
    check_new(out)
    staging = staging_folder(out)
    with _locked_staging(staging, out):
        try:
            check_new(out)  # the process that had the lock may have completed it
            _empty(staging)
            yield staging
            sync(staging)
            staging.rename(out)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        sync(out.parent)


@contextlib.contextmanager
def _locked_staging(staging: Path, out: Path) -> Iterator[None]:
    """Make the staging folder, and lock it against others that would write ``out``."""
    staging.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(descriptor), staging.stat())
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise CheckpointError(
                f"{out} is being written by another process: wait for that, or name another"
            )
        yield
    finally:
        os.close(descriptor)


def _empty(folder: Path) -> None:
    """Remove the remains of a killed attempt."""
    for left in folder.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


def copy_file(source: Path, target: Path, name: str) -> FileRecord:
    """Copy a file from one folder to another, under the same name; return its record."""
    with (source / name).open("rb") as read, ChecksummedFile(target, name) as file:
        while chunk := read.read(CHUNK_BYTES):
            file.write(chunk)
    return file.record


class Copies:
    """Copies of the contents of a folder. `write` makes them; ``total_bytes`` is known before.

    Links stay links to their targets. Only files, folders and links are copied.

    Args:
        folder: the source.
        names: files and folders in it; folders are copied with their contents.
    """

    def __init__(self, folder: Path, names: Collection[str]) -> None:
        self._folder = folder
        self.names = tuple(sorted(names))
        self._found = [one for name in self.names for one in _within(folder, Path(name))]
        paths = [folder / one for one in self._found]
        self.total_bytes = sum(
            one.stat().st_size for one in paths if one.is_file() and not one.is_symlink()
        )

    def write(self, target: Path, advance: Advance) -> None:
        """Copy the files into ``target``, which has none of them."""
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
