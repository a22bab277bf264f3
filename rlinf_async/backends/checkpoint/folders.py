"""Checkpoint folders: complete or absent, kept or removed, whenever a process is killed.

::

    .NAME.partial/     being written        --commit, by whichever rank is done last--> NAME/
    NAME/              complete
    .NAME.previous/    the replaced folder, for the moment between two renames
    .NAME.beside/      files that are added to NAME as soon as it is complete

Invariants: a folder called NAME is complete. A folder is not removed while it is read: readers hold
a shared lock on it and on its parent (which may be a checkpoint too, and removed as one), and it is
removed under an exclusive lock.

::

    rank_0_of_2.json   `RankRecord`: written last by each rank, so that one of them sees that all
                       are done; removed from a complete folder
    metadata.json      `Metadata`: a folder that has it is complete
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec


class CheckpointError(Exception):
    """A checkpoint could not be written or read, or does not fit.

    The message names the file, the tensor, and what differs.
    """


FORMAT = 2
METADATA = "metadata.json"
MODEL_FOLDER = "model"
"""folder inside a checkpoint: configuration and tokenizer of a language model, no weights"""


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the folder: its size and checksum when it was written."""

    name: str
    """relative to the folder"""
    size: int
    """size in bytes"""
    checksum: int
    """crc32 of the file"""


class SavedStrategy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Strategy by which saved tensors are cut: by tensor-parallel rank, and each part by FSDP2's
    rows.

    Ranks are numbered as in `rlinf_async.parallel`: ``rank = tp_rank + tp * dp_rank``. Which rows
    are in a rank's file is recorded in that file: runs have an order of their own.
    """

    dp: int = 1
    tp: int = 1

    def __str__(self) -> str:
        return f"dp={self.dp} tp={self.tp}"


class RankRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files that one rank has written."""

    tensors: FileRecord
    own: FileRecord
    model: tuple[FileRecord, ...] = ()
    """files of the model folder; rank 0 only"""
    aliases: dict[str, str] = {}


class Metadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of ``metadata.json``."""

    format: int = FORMAT
    strategy: SavedStrategy
    tensors: tuple[FileRecord, ...]
    """``rank_R_of_N.safetensors``, by rank"""
    own: tuple[FileRecord, ...]
    """``rank_R_of_N.pt``: values of each rank of the run besides tensors; one file for each rank of
    the run, where the number of files of tensors is the strategy's"""
    model: tuple[FileRecord, ...] = ()
    aliases: dict[str, str] = {}
    """tied tensors, which are stored once: name -> the name that is stored"""
    crc32: int | None = None
    """checksum of the file before this field; None in folders of earlier versions"""


class MetadataV1(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Format 1: rows of tensors and the rank's own in one ``rank_R_of_N.pt`` each."""

    format: int
    world_size: int
    files: tuple[FileRecord, ...]


class _Any(msgspec.Struct):
    format: int


def of_ranks(records: list[RankRecord]) -> Metadata:
    """Return the metadata of what ranks 0, 1, ... of a data-parallel run have written."""
    return Metadata(
        strategy=SavedStrategy(dp=len(records)),
        tensors=tuple(one.tensors for one in records),
        own=tuple(one.own for one in records),
        model=records[0].model,
        aliases=records[0].aliases,
    )


def encode(record: Metadata | RankRecord) -> bytes:
    """Return indented JSON; that of metadata has its checksum at the end."""
    if isinstance(record, Metadata):
        record = msgspec.structs.replace(record, crc32=_checksum(_indented(record)))
    return _indented(record)


def _indented(record: Metadata | RankRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def _checksum(content: bytes) -> int:
    return zlib.crc32(content.rpartition(b'"crc32"')[0])


def read_metadata(folder: Path) -> Metadata | MetadataV1:
    """Return the metadata of a folder. Raises `CheckpointError`."""
    path = folder / METADATA
    try:
        content = path.read_bytes()
        version = msgspec.json.decode(content, type=_Any).format
        if version == 1:
            first = msgspec.json.decode(content, type=MetadataV1)
            _check_within(path, first.files)
            return first
        if version == FORMAT:
            found = msgspec.json.decode(content, type=Metadata)
            _check_intact(path, content, found)
            _check_within(path, (*found.tensors, *found.own, *found.model))
            return found
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    raise CheckpointError(
        f"{folder} has format {version}; this version of rlinf_async reads formats 1 and {FORMAT}"
    )


def _check_intact(path: Path, content: bytes, found: Metadata) -> None:
    if found.crc32 not in (None, _checksum(content)):
        raise CheckpointError(
            f"{path} is damaged: its checksum is not that of what was written; use another "
            "checkpoint, or restore the file"
        )
    expected = found.strategy.dp * found.strategy.tp
    if len(found.tensors) != expected:
        raise CheckpointError(
            f"{path} names {len(found.tensors)} files of tensors, but {found.strategy} has "
            f"{expected}: use another checkpoint, or restore the file"
        )


def _check_within(path: Path, records: Iterable[FileRecord]) -> None:
    """Refuse names that lead out of the folder: such files would be read, and written elsewhere."""
    for record in records:
        name = PurePosixPath(record.name)
        if name.is_absolute() or ".." in name.parts or not name.parts:
            raise CheckpointError(f"{path} names a file outside of its folder: {record.name!r}")


LATEST = "latest.json"
"""file beside a run's checkpoints with the name of the one that the run resumes from"""

_NUMBERED = re.compile(r"version-\d+")
"""names of a run's own checkpoints; a user's copy (``version-000010-four``) must not be removed"""
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<what>partial|previous|beside)")


def staging_folder(path: Path) -> Path:
    """Return the folder in which a checkpoint is written before it is renamed to ``path``."""
    return path.parent / f".{path.name}.partial"


def previous_folder(path: Path) -> Path:
    """Return the name of a replaced folder until it is removed."""
    return path.parent / f".{path.name}.previous"


def fresh_staging(path: Path) -> Path:
    """Make an empty staging folder for ``path``; the remains of an earlier attempt are removed."""
    folder = staging_folder(path)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def tensor_file(rank: int, ranks: int) -> str:
    """Return the name of a rank's file of tensors."""
    return f"rank_{rank}_of_{ranks}.safetensors"


def own_file(rank: int, ranks: int) -> str:
    """Return the name of a rank's file of other values."""
    return f"rank_{rank}_of_{ranks}.pt"


def _record_file(rank: int, ranks: int) -> str:
    return f"rank_{rank}_of_{ranks}.json"


def rank_done(path: Path, rank: int, ranks: int, record: RankRecord) -> bool:
    """Record that a rank's files are on the disk; the last rank gives the folder its name.

    Returns whether this was the last one. Every rank writes its record before it looks for the
    others, so the last one sees all; where two see all, only one can rename rank 0's record.
    """
    staging = staging_folder(path)
    write_whole(staging / _record_file(rank, ranks), encode(record))
    notes = [staging / _record_file(one, ranks) for one in range(ranks)]
    if not all(note.exists() for note in notes):
        return False
    claimed = staging / "claimed.json"
    try:
        os.rename(notes[0], claimed)
    except FileNotFoundError:
        return False
    notes[0] = claimed
    records = [msgspec.json.decode(note.read_bytes(), type=RankRecord) for note in notes]
    for note in notes:
        note.unlink()
    commit(path, of_ranks(records))
    return True


def commit(path: Path, metadata: Metadata) -> None:
    """Give the staging folder its metadata and its name.

    A folder that had this name before is removed as soon as nobody reads it; the next `commit`
    waits for that.
    """
    staging, previous = staging_folder(path), previous_folder(path)
    write_whole(staging / METADATA, encode(metadata))
    remove(previous, wait=True)
    if path.exists():
        os.rename(path, previous)
    os.rename(staging, path)
    sync(path.parent)
    remove(previous)


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file atomically, and flush it to the disk.

    Its folder may be renamed as soon as the file is visible.
    """
    partial = path.with_name(f".{path.name}")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    # Opened before: a rank that sees the last record renames the staging folder.
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.rename(partial, path)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(folder: Path) -> None:
    """Wait until the entries of a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_checkpoint(path: Path) -> Path:
    """Return the complete folder for ``path``; raises `CheckpointError` when there is none."""
    for folder in (path, previous_folder(path)):
        if (folder / METADATA).is_file():
            return folder
    why = f"it has no {METADATA}" if path.exists() else "there is nothing of that name"
    raise CheckpointError(f"{path} is not a checkpoint: {why}")


class Newest(NamedTuple):
    """The checkpoint that a run resumes from, and the file that names it."""

    note: Path
    content: bytes
    checkpoint: Path


def newest_note(path: Path) -> Newest | None:
    """Return the newest checkpoint of a run's folder, or its checkpoints'; None for other folders.

    Raises `CheckpointError` when the run's note cannot be read, or is not there yet.
    """
    for folder in (path, path / "checkpoints"):
        note = folder / LATEST
        if note.is_file() and not (folder / METADATA).exists():
            try:
                content = note.read_bytes()
                name = msgspec.json.decode(content, type=_Note).checkpoint
            except (OSError, msgspec.DecodeError) as error:
                raise CheckpointError(f"{note} cannot be read: {error}") from error
            if name != Path(name).name or not name:
                raise CheckpointError(f"{note} names no folder beside it, but {name!r}")
            return Newest(note, content, folder / name)
    if (path / "checkpoints").is_dir() and not (path / METADATA).exists():
        raise CheckpointError(
            f"the run in {path} has no complete checkpoint: there is no checkpoints/{LATEST}"
        )
    return None


def newest_of_run(path: Path) -> Path:
    """Return ``path``, or the newest checkpoint of a run's folder, or of its checkpoints'.

    Raises `CheckpointError` when the run's note cannot be read.
    """
    newest = newest_note(path)
    return path if newest is None else newest.checkpoint


class _Note(msgspec.Struct):
    checkpoint: str


@contextlib.contextmanager
def being_read(folder: Path) -> Iterator[None]:
    """Keep a complete folder from being removed inside the block.

    The locks hold among processes of one host, and on most network file systems. Raises
    `CheckpointError` if the folder is gone.
    """
    around = folder.resolve().parent
    with contextlib.ExitStack() as held:
        for one in (around, folder):
            try:
                descriptor = os.open(one, os.O_RDONLY)
            except FileNotFoundError:
                raise CheckpointError(f"{folder} is gone") from None
            except PermissionError:
                if one == folder:
                    raise
                continue  # not readable for this user, so not a checkpoint of theirs
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not (folder / METADATA).is_file():
            raise CheckpointError(f"{folder} was removed before it could be read")
        yield


def remove(folder: Path, *, wait: bool = False) -> bool:
    """Remove a checkpoint unless it is being read; return whether it is gone.

    With ``wait``, wait for its readers.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        # If the process is killed in the middle, the remains must not look complete.
        (folder / METADATA).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return not folder.exists()


def keep_newest(
    checkpoints: Path, newest: str, count: int, *, previous: str | None = None, best: str = ""
) -> None:
    """Keep ``newest`` and the ``count - 1`` before it, by name, and the best; remove those that are
    older.

    Those between ``previous`` and ``newest`` are removed and do not count: the run went on from
    ``previous`` and never resumed from them. It was killed after they were complete and before
    `LATEST` named them, or was set back to an earlier checkpoint by its user.

    Later ones are kept: one of them may be about to become the newest. One that is being read is
    kept until the next call.

    Args:
        checkpoints: folder of the checkpoints.
        newest: the checkpoint that `LATEST` names now.
        count: checkpoints to keep.
        previous: the checkpoint that `LATEST` named before; None where there was none.
        best: the best checkpoint, kept however old it is; empty: none is.
    """
    so_far = sorted(
        path
        for path in checkpoints.iterdir()
        if path.is_dir() and _NUMBERED.fullmatch(path.name) and path.name <= newest
    )
    never_named = [path for path in so_far if previous and previous < path.name < newest]
    named = [path for path in so_far if path not in never_named]
    for path in never_named + named[:-count]:
        if path.name != best:
            remove(path)


def clean(checkpoints: Path) -> None:
    """Remove unfinished folders of a killed run, and complete a rename that it had begun.

    To be called while no process writes there.
    """
    if not checkpoints.is_dir():
        return
    for path in sorted(checkpoints.iterdir()):
        found = _HIDDEN.fullmatch(path.name)
        if found is None or not path.is_dir():
            continue
        target = checkpoints / found["name"]
        if found["what"] == "previous" and not target.exists() and (path / METADATA).is_file():
            os.rename(path, target)
        else:
            remove(path)
