"""Files of a run: atomic writes, and errors that say what the caller can do.

Invariant: a reader of a path written here never sees half a file. The bytes go to a hidden
neighbour, are synced, and are renamed over the path. (Not synced where a file may be lost with the
machine.)

::

    ObserveError
     +-- RunFolderError     the run folder: taken, not ours, full, not writable
     +-- MetricsError       a metric that is not a number, a sink that is unknown or broke
     +-- VideoError         the env does not render, or renders nothing
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


class ObserveError(Exception):
    """Root of everything that `rlinf_async.observe` raises."""


class RunFolderError(ObserveError):
    """The run folder cannot be used; says which path, why, and what to do."""


class MetricsError(ObserveError):
    """A metric or a metrics sink is at fault, and is named."""


class VideoError(ObserveError):
    """No video could be made of the env; says which step of it failed."""


_PARTIAL = ".partial-"

_ADVICE = {
    errno.ENOSPC: "free some space there, or choose a folder on another disk",
    errno.EDQUOT: "free some of your quota there, or choose a folder on another disk",
    errno.EROFS: "that file system is read-only: choose another folder",
    errno.EACCES: "you may not write there: choose another folder, or change its permissions",
    errno.EPERM: "you may not write there: choose another folder, or change its permissions",
    errno.ENOTDIR: "a part of that path is a file: choose another folder",
    errno.EISDIR: "a folder is in the place of the file: move it away",
    errno.EEXIST: "a file is in the place of the folder: move it away, or choose another folder",
    errno.ENAMETOOLONG: "choose a shorter name",
}


@contextlib.contextmanager
def explaining(doing: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `RunFolderError` that names ``path``, the cause and a way out."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error) or type(error).__name__
        advice = _ADVICE.get(error.errno or 0, "choose another folder, or repair this one")
        raise RunFolderError(f"cannot {doing} {path}: {cause}; {advice}") from error


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A path to write to, with the suffix of ``path``, whose place it takes when the block ends.

    ``durable``: it is synced, and stays when the machine stops; this takes some milliseconds.

    Raises:
        RunFolderError: the file could not be written; what was at ``path`` is still there.
    """
    partial = path.with_name(f"{_PARTIAL}{os.getpid()}-{path.name}")
    with explaining("write", path):
        try:
            yield partial
            if durable:
                _sync(partial)
            os.replace(partial, path)
            if durable:
                _sync(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def atomic_write(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write a whole file at once: text as UTF-8. ``durable``: see `replacing`.

    Raises:
        RunFolderError: the file could not be written; what was at ``path`` is still there.
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing(path, durable=durable) as partial:
        write_all(partial, data)


def write_all(path: Path, data: bytes) -> None:
    """Create ``path`` with these bytes; a plain `OSError` where it fails."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        append_all(descriptor, data)
    finally:
        os.close(descriptor)


def append_all(descriptor: int, data: bytes) -> None:
    """Append every byte, or none where it fails with an `OSError`.

    A disk that is nearly full takes a part first, and fails on the rest.
    """
    end = os.fstat(descriptor).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.ftruncate(descriptor, end)
        raise


def is_partial(path: Path) -> bool:
    """Whether ``path`` is a temporary file that a killed process left while it replaced a file."""
    return path.name.startswith(_PARTIAL)


def _sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
