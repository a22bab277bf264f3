"""Any checkpoint folder as global tensors: their boxes, in whichever files they are stored.

::

    files --size, crc32--> mapped into memory --> SavedTensor: boxes that cover it --> your cut

Nothing is copied until a piece is cut out. Files are read as safetensors, or by torch's
``weights_only`` loader: a checkpoint cannot run code.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlinf_async.backends.checkpoint.errors import CheckpointError
from rlinf_async.backends.checkpoint.folders import find_checkpoint
from rlinf_async.backends.checkpoint.metadata import (
    METADATA,
    FileRecord,
    FileRecordV1,
    Metadata,
    MetadataV1,
    Strategy,
    read_metadata,
)
from rlinf_async.backends.checkpoint.tensor_file import LAYOUT, Layout, checksum

Bounds = tuple[int, ...]


class SavedBox(NamedTuple):
    """A box of a global tensor."""

    start: Bounds
    data: Tensor
    """elements of the box, mapped from the file"""


class SavedTensor:
    """A global tensor out of a checkpoint, in boxes that do not overlap."""

    def __init__(self, name: str, shape: Bounds, dtype: torch.dtype) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._boxes: dict[tuple[Bounds, Bounds], SavedBox] = {}

    def add(self, start: Bounds, data: Tensor) -> None:
        """Add a box; several ranks may have stored the same one."""
        if data.numel():
            self._boxes.setdefault((start, tuple(data.shape)), SavedBox(start, data))

    @property
    def missing(self) -> int:
        """The number of elements that are in no file."""
        return math.prod(self.shape) - sum(box.data.numel() for box in self._boxes.values())

    def fill(self, target: Tensor, start: Bounds) -> None:
        """Copy the box that begins at ``start`` and has the target's shape into the target."""
        for box in self._boxes.values():
            low = [max(a, b) for a, b in zip(start, box.start, strict=True)]
            high = [
                min(a + n, b + m)
                for a, n, b, m in zip(start, target.shape, box.start, box.data.shape, strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            to = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            of = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, box.start, strict=True))
            target[to].copy_(box.data[of])

    def whole(self) -> Tensor:
        """Return the whole tensor: mapped where one file has it, else assembled in memory."""
        if len(self._boxes) == 1:
            return next(iter(self._boxes.values())).data
        made = torch.empty(self.shape, dtype=self.dtype)
        self.fill(made, (0,) * len(self.shape))
        return made


class Saved(NamedTuple):
    """A checkpoint that was read."""

    folder: Path
    strategy: Strategy
    tensors: dict[str, SavedTensor]
    own: list[dict[str, Any]]
    """values besides tensors of each rank that wrote"""
    aliases: dict[str, str]
    metadata: Metadata | None
    """metadata of the folder; None for format 1"""


Wanted = Callable[[int], bool]


def everything(_: int) -> bool:
    """Every file is checked by this process."""
    return True


def read_checkpoint(path: Path, checked: Wanted = everything) -> Saved:
    """Map a checkpoint folder into memory.

    ``checked`` returns whether this process compares the checksum of the file of this number: ranks
    that read together share that work. Sizes are always compared. Raises `CheckpointError` for a
    file that is missing, changed, or of another format.
    """
    folder = find_checkpoint(path)
    metadata = read_metadata(folder)
    if isinstance(metadata, MetadataV1):
        return _read_v1(folder, metadata, checked)
    for number, record in enumerate((*metadata.tensors, *metadata.own)):
        check_file(folder, record, summed=checked(number))
    found: dict[str, SavedTensor] = {}
    for record in metadata.tensors:
        _map(folder / record.name, found)
    own = [load_plain(folder / record.name) for record in metadata.own]
    _check_whole(found.values())
    _check_aliases(folder, metadata.aliases, found)
    return Saved(folder, metadata.strategy, found, own, metadata.aliases, metadata)


def check_file(folder: Path, record: FileRecord | FileRecordV1, *, summed: bool = True) -> None:
    """Raise `CheckpointError`, naming the file, if it is missing or changed."""
    target = folder / record.name
    if not target.is_file():
        raise CheckpointError(f"{target} is missing: {_ELSEWHERE}")
    size = target.stat().st_size
    if size != record.size:
        raise CheckpointError(
            f"{target} is damaged: it has {size} bytes, {record.size} were written; {_ELSEWHERE}"
        )
    if summed and checksum(target) != record.checksum:
        raise CheckpointError(
            f"{target} is damaged: its checksum is not that of what was written; {_ELSEWHERE}"
        )


_ELSEWHERE = "use another checkpoint, or restore the file"


def load_plain(target: Path) -> dict[str, Any]:
    """Read plain values and tensors that torch saved; `CheckpointError` for anything else."""
    return _load(target, mmap=False)


def _load(target: Path, *, mmap: bool) -> dict[str, Any]:
    try:
        with _no_other_objects():
            content: dict[str, Any] = torch.load(
                target, map_location="cpu", weights_only=True, mmap=mmap
            )
    except pickle.UnpicklingError:
        # torch's own text recommends to switch off the protection, so it is not shown.
        raise CheckpointError(
            f"{target} holds more than tensors and plain values, so it is not loaded: it was not "
            "written by save_checkpoint()"
        ) from None
    return content


@contextmanager
def _no_other_objects() -> Iterator[None]:
    """Keep ``torch.load(weights_only=True)`` from what else this process lets it build: paths,
    signals and more once megatron-core is imported."""
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(allowed)


def _map(path: Path, found: dict[str, SavedTensor]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            layout = msgspec.json.decode((file.metadata() or {}).get(LAYOUT, ""), type=Layout)
            names = file.keys()
            for name in names:
                stored: Tensor = file.get_tensor(name)
                flat = stored.reshape(-1)
                for box in layout.boxes[name]:
                    shape = layout.shapes[box.tensor]
                    tensor = found.setdefault(
                        box.tensor, SavedTensor(box.tensor, shape, stored.dtype)
                    )
                    data = flat[box.offset : box.offset + box.elements].view(box.size)
                    tensor.add(box.start, data)
    except (SafetensorError, msgspec.DecodeError, KeyError) as error:
        raise CheckpointError(f"{path} is not a file of a checkpoint: {error}") from error


def _check_whole(tensors: Iterable[SavedTensor]) -> None:
    for one in tensors:
        if one.missing:
            raise CheckpointError(
                f"{one.name!r}: {one.missing} of its {math.prod(one.shape)} elements are in no file"
            )


def _check_aliases(
    folder: Path, aliases: Mapping[str, str], found: Mapping[str, SavedTensor]
) -> None:
    for name, first in aliases.items():
        if first not in found:
            raise CheckpointError(
                f"{folder / METADATA} says that {name!r} is {first!r}, which is in no file"
            )


def _read_v1(folder: Path, metadata: MetadataV1, checked: Wanted) -> Saved:
    found: dict[str, SavedTensor] = {}
    own: list[dict[str, Any]] = []
    for number, record in enumerate(metadata.files):
        check_file(folder, record, summed=checked(number))
        content = _load(folder / record.name, mmap=True)
        for name, entry in content.pop("state").items():
            data, rows = entry["data"], entry["rows"]
            shape = tuple(data.shape) if rows < 0 else (rows, *data.shape[1:])
            start = (entry["start"], *(0,) * (data.ndim - 1))[: data.ndim]
            found.setdefault(name, SavedTensor(name, shape, data.dtype)).add(start, data)
        own.append(content)
    _check_whole(found.values())
    return Saved(folder, Strategy(dp=metadata.world_size), found, own, {}, None)
