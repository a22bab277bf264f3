"""The contents of ``metadata.json``, and the record that each rank writes before it exists.

::

    rank_0_of_2.json   `RankRecord`: written last by each rank, so that one of them sees that all
                       are done; removed from a complete folder
    metadata.json      `Metadata`: a folder that has it is complete
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import msgspec

from rlinf_async.backends.checkpoint.errors import CheckpointError

FORMAT = 2
METADATA = "metadata.json"
MODEL_FOLDER = "model"
"""folder inside a checkpoint: configuration and tokenizer of a language model, no weights"""


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the folder: its size and checksum when it was written."""

    name: str
    """relative to the folder"""
    size: int
    """bytes"""
    checksum: int
    """crc32"""


class Strategy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tensors are cut: by tensor-parallel rank, and each part by FSDP2's rows.

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
    strategy: Strategy
    tensors: tuple[FileRecord, ...]
    """``rank_R_of_N.safetensors``, by rank"""
    own: tuple[FileRecord, ...]
    """``rank_R_of_N.pt``: values of each rank of the run besides tensors; one file for each rank of
    the run, where the number of files of tensors is the strategy's"""
    model: tuple[FileRecord, ...] = ()
    aliases: dict[str, str] = {}
    """tied tensors, which are stored once: name -> the name that is stored"""
    crc32: int | None = None
    """of what is written before it; None in folders of earlier versions"""


class FileRecordV1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's file of format 1."""

    name: str
    size: int
    checksum: int


class MetadataV1(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Format 1: rows of tensors and the rank's own in one ``rank_R_of_N.pt`` each."""

    format: int
    world_size: int
    files: tuple[FileRecordV1, ...]


AnyMetadata: TypeAlias = Metadata | MetadataV1


class _Any(msgspec.Struct):
    format: int


def of_ranks(records: list[RankRecord]) -> Metadata:
    """Return the metadata of what ranks 0, 1, ... of a data-parallel run have written."""
    return Metadata(
        strategy=Strategy(dp=len(records)),
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


def read_metadata(folder: Path) -> AnyMetadata:
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


def _check_within(path: Path, records: Iterable[FileRecord | FileRecordV1]) -> None:
    """Refuse names that lead out of the folder: such files would be read, and written elsewhere."""
    for record in records:
        name = PurePosixPath(record.name)
        if name.is_absolute() or ".." in name.parts or not name.parts:
            raise CheckpointError(f"{path} names a file outside of its folder: {record.name!r}")
