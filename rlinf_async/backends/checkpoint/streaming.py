"""Files of tensors, written one tensor at a time, so that one is in memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from rlinf_async.backends.checkpoint.errors import CheckpointError
from rlinf_async.backends.checkpoint.folders import staging_folder, sync
from rlinf_async.backends.checkpoint.metadata import FileRecord
from rlinf_async.backends.checkpoint.tensor_file import ChecksummedFile, Entry

Advance: TypeAlias = Callable[[int], None]
"""callback for progress, with the number of bytes written since the last call"""


def write_tensors(
    folder: Path,
    name: str,
    head: bytes,
    entries: Sequence[Entry],
    make: Callable[[Entry], Tensor],
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
    with _alone(staging, out):
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
def _alone(staging: Path, out: Path) -> Iterator[None]:
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
