"""A checkpoint folder: one file from every rank with the slices it holds, and ``metadata.json``.

::

    PATH/rank_0_of_2.pt   {"model.actor.0.weight": {"data": ..., "start": 0, "rows": 64}, ...}
    PATH/rank_1_of_2.pt
    PATH/metadata.json    format, world size, and size and crc32 of each file

A slice is a range of rows of a global tensor, so that any number of ranks can read what any other
number wrote. What is the same on all ranks is written by rank 0 alone. Files are read with torch's
``weights_only`` loader: a checkpoint cannot run code.

Invariant: a folder at PATH is complete. Everything is written beside it and renamed at the end; a
kill in the middle of the renaming leaves the folder before, which `find_checkpoint` still finds.
"""

from __future__ import annotations

import os
import pickle
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlinf_async.backends.fsdp.errors import CheckpointError
from rlinf_async.backends.fsdp.sharding import local_shard

FORMAT = 1
CHUNK_BYTES = 16 * 1024 * 1024


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's file."""

    name: str
    size: int
    """bytes"""
    checksum: int
    """crc32"""


class Metadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``metadata.json`` holds."""

    format: int
    world_size: int
    files: tuple[FileRecord, ...]


class Slice(msgspec.Struct, frozen=True):
    """Rows ``start`` .. ``start + len(data)`` of a global tensor of ``rows`` rows.

    ``rows`` is -1 for a tensor that is whole.
    """

    data: Tensor
    start: int
    rows: int


def slices(state: Mapping[str, Tensor], rank: int) -> dict[str, dict[str, Any]]:
    """Return what this rank has to write of ``state``: its shards, and on rank 0 whole tensors."""
    written: dict[str, dict[str, Any]] = {}
    for name, tensor in state.items():
        local = local_shard(tensor).detach()
        if isinstance(tensor, DTensor):
            start, rows = first_row(tensor), tensor.shape[0]
        elif rank == 0:
            start, rows = 0, -1
        else:
            continue
        # A view would drag the whole storage behind it into the file.
        written[name] = {"data": local.cpu().clone(), "start": start, "rows": rows}
    return written


def first_row(tensor: DTensor) -> int:
    """Return the first global row of this rank's shard (rows are dealt as by ``torch.chunk``)."""
    mesh = tensor.device_mesh
    chunk = -(-tensor.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * chunk, tensor.shape[0])


def staging_folder(path: Path) -> Path:
    """Return where a checkpoint is put together before it is renamed to ``path``."""
    return path.parent / f".{path.name}.partial"


def _previous_folder(path: Path) -> Path:
    return path.parent / f".{path.name}.previous"


def write_file(folder: Path, name: str, content: Mapping[str, Any]) -> FileRecord:
    """Write one rank's file and wait until it is on the disk."""
    target = folder / name
    with target.open("wb") as file:
        torch.save(dict(content), file)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(name, target.stat().st_size, _file_checksum(target))


def commit(path: Path, metadata: Metadata) -> None:
    """Give the staging folder its metadata and its name."""
    staging, previous = staging_folder(path), _previous_folder(path)
    with (staging / "metadata.json").open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(metadata), indent=1))
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(previous, ignore_errors=True)
    if path.exists():
        path.rename(previous)
    staging.rename(path)
    shutil.rmtree(previous, ignore_errors=True)


def find_checkpoint(path: Path) -> Path:
    """Return the complete folder for ``path``; raises `CheckpointError` when there is none."""
    for folder in (path, _previous_folder(path)):
        if (folder / "metadata.json").is_file():
            return folder
    raise CheckpointError(f"{path} is not a checkpoint: it has no metadata.json")


def read_files(path: Path) -> list[dict[str, Any]]:
    """Return the content of every rank's file, in rank order, after checking each.

    Raises `CheckpointError` for a file that is missing, changed, or of another format.
    """
    folder = find_checkpoint(path)
    try:
        metadata = msgspec.json.decode((folder / "metadata.json").read_bytes(), type=Metadata)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / 'metadata.json'} cannot be read: {error}") from error
    if metadata.format != FORMAT:
        raise CheckpointError(
            f"{folder} has format {metadata.format}; this version reads format {FORMAT}"
        )
    return [_read_file(folder / record.name, record) for record in metadata.files]


def gather(pieces: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, list[Slice]]:
    """Return the slices of all ranks by tensor name."""
    found: dict[str, list[Slice]] = {}
    for piece in pieces:
        for name, entry in piece.items():
            one = Slice(entry["data"], entry["start"], entry["rows"])
            found.setdefault(name, []).append(one)
    return found


def check_slices(target: Tensor, pieces: list[Slice], name: str) -> None:
    """Raise `CheckpointError` unless the slices have the target's shape, dtype and all its rows."""
    first = pieces[0]
    rows = first.data.shape[:1] if first.rows < 0 else (first.rows,)
    shape = (*rows, *first.data.shape[1:])
    if shape != tuple(target.shape):
        raise CheckpointError(
            f"{name!r} is {list(shape)} in the checkpoint, {list(target.shape)} in the model"
        )
    if first.data.dtype != target.dtype:
        raise CheckpointError(
            f"{name!r} is {first.data.dtype} in the checkpoint, {target.dtype} in the model"
        )
    held = sum(len(piece.data) for piece in pieces) if first.rows >= 0 else first.rows
    if held != first.rows:
        raise CheckpointError(f"{name!r}: {first.rows - held} of {first.rows} rows are in no file")


def fill(target: Tensor, pieces: list[Slice]) -> None:
    """Copy the rows that this rank holds of ``target`` out of the slices, in place."""
    local = local_shard(target).detach()
    if not isinstance(target, DTensor) and pieces[0].rows < 0:
        local.copy_(pieces[0].data)
        return
    start = first_row(target) if isinstance(target, DTensor) else 0
    for piece in pieces:
        low = max(start, piece.start)
        high = min(start + len(local), piece.start + len(piece.data))
        if low < high:
            rows = piece.data[low - piece.start : high - piece.start]
            local[low - start : high - start].copy_(rows)


def _read_file(target: Path, record: FileRecord) -> dict[str, Any]:
    if not target.is_file():
        raise CheckpointError(f"{target} is missing")
    size = target.stat().st_size
    if size != record.size or _file_checksum(target) != record.checksum:
        raise CheckpointError(
            f"{target} is damaged: {size} bytes, {record.size} were written, "
            "or the checksum differs; use another checkpoint"
        )
    try:
        content: dict[str, Any] = torch.load(
            target, map_location="cpu", weights_only=True, mmap=True
        )
    except pickle.UnpicklingError:
        # torch's own text recommends to switch the protection off: it is not passed on.
        raise CheckpointError(
            f"{target} holds more than tensors and plain values, so it is not loaded: it was not "
            "written by save_checkpoint()"
        ) from None
    return content


def _file_checksum(target: Path) -> int:
    checksum = 0
    with target.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
