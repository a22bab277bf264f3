"""One file of tensors, written in one pass: safetensors, with the boxes of its tensors.

::

    8 bytes: length | header, JSON: dtype, shape, place of each tensor | the tensors' bytes

The safetensors library reads and checks it, but would write it from copies in memory and without a
checksum, so it is written here. The header's ``__metadata__`` has the global shapes and, for each
tensor of the file, the boxes of global tensors that it is made of.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import torch
from torch import Tensor

from rlinf_async.backends.checkpoint.folders import FileRecord

CHUNK_BYTES = 16 * 1024 * 1024
LAYOUT = "rlinf_async.layout"

DTYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}


class Box(NamedTuple):
    """A box of a global tensor, row-major and without gaps inside a tensor of the file."""

    tensor: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    """elements before it in the tensor of the file"""

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.size)


class TensorEntry(NamedTuple):
    """A tensor of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class FileLayout(msgspec.Struct, frozen=True):
    """The boxes of a file, in its ``__metadata__``."""

    shapes: dict[str, tuple[int, ...]]
    """shapes of the global tensors"""
    boxes: dict[str, tuple[Box, ...]]
    """boxes of each tensor of the file"""


def in_file_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Sort by dtype, the widest first, so that every tensor is aligned without gaps."""
    return sorted(entries, key=lambda one: (-one.dtype.itemsize, one.name))


def header(
    entries: Sequence[TensorEntry],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    about: Mapping[str, str] | None = None,
) -> bytes:
    """Return the header, its length included, for tensors that follow in this order.

    ``shapes``: of the global tensors, where the entries have boxes; ``about``: further texts for
    ``__metadata__``.
    """
    texts = dict(about or {})
    if shapes is not None:
        boxes = {one.name: one.boxes for one in entries}
        # In the order of the entries: equal tensors make equal files.
        known = {box.tensor: shapes[box.tensor] for one in entries for box in one.boxes}
        texts[LAYOUT] = msgspec.json.encode(FileLayout(known, boxes)).decode()
    fields: dict[str, Any] = {"__metadata__": texts}
    at = 0
    for one in entries:
        fields[one.name] = {
            "dtype": DTYPES[one.dtype],
            "shape": one.shape,
            "data_offsets": (at, at + one.nbytes),
        }
        at += one.nbytes
    encoded = msgspec.json.encode(fields)
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


class ChecksummedFile:
    """A new file, written from front to back; at the end of the block it is on the disk.

    Other threads run while bytes are summed and written.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        self._name = name
        self._size = 0
        self._checksum = 0

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes. An `OSError` names the file."""
        rest = memoryview(data).cast("B")
        while rest:
            chunk = rest[:CHUNK_BYTES]
            try:
                written = os.write(self._descriptor, chunk)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            self._checksum = zlib.crc32(chunk[:written], self._checksum)
            self._size += written
            rest = rest[written:]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    @property
    def record(self) -> FileRecord:
        """Name, size and checksum, once it is written."""
        return FileRecord(self._name, self._size, self._checksum)


def write_file(folder: Path, name: str, content: bytes | memoryview) -> FileRecord:
    """Write a file from bytes in memory."""
    with ChecksummedFile(folder, name) as file:
        file.write(content)
    return file.record


def checksum(path: Path) -> int:
    """Return the crc32 of a file."""
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found = zlib.crc32(chunk, found)
    return found


class RankPart(NamedTuple):
    """The part of a state that one rank writes."""

    entries: list[TensorEntry]
    """entries in the order of the file"""
    shapes: dict[str, tuple[int, ...]]
    """shapes of the global tensors"""
    live: dict[str, Tensor]
    """the tensors themselves, which training changes"""
