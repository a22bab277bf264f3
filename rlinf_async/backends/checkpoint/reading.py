"""Any checkpoint folder as global tensors: their boxes, in whichever files they are stored.

::

    files --size, crc32--> mapped into memory --> SavedTensor: boxes that cover it --> your cut

Invariants: of every tensor that is returned, each element is in exactly one box; a parameter has
all of its moments, or none. Boxes that several files have are the same in all of them; those that
overlap otherwise, leave elements out, or lie outside of their tensor or their file are refused,
with the files.

Nothing is copied until a piece is cut out. Files are read as safetensors, or by torch's
``weights_only`` loader: a checkpoint cannot run code.

A language model's weights are stored as ``model.language.NAME``, moments as
``optimizer.language.NAME.exp_avg``. How tensor-parallel ranks cut them says the name map of their
decoder (`by_name_map`); a critic's value head is whole on every tensor rank. The map has a name for
each expert; transformers 5 and checkpoints have them fused, ``[experts, ...]``:
`NamedParameters.places` has the place of each in the fused tensor.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlinf_async.backends.checkpoint.folders import (
    METADATA,
    MODEL_FOLDER,
    CheckpointError,
    FileRecord,
    Metadata,
    MetadataV1,
    SavedStrategy,
    find_checkpoint,
    read_metadata,
)
from rlinf_async.backends.checkpoint.tensor_file import LAYOUT, Box, FileLayout, checksum
from rlinf_async.backends.language_training.lora import is_of_adapter
from rlinf_async.parallel import GlobalTensor, Model, ModelMismatch, Parameter, Piece, layout
from rlinf_async.parallel import Strategy as ParallelStrategy
from rlinf_async.parallel.decoders import ARCHITECTURES, DecoderSizes, huggingface
from rlinf_async.parallel.regions import Boxes, ordered_by, overlapping
from rlinf_async.parallel.splits import nearest_names

WEIGHTS, MOMENTS = "model.", "optimizer."
"""prefixes of the names of weights, and of the optimizer's state"""
LANGUAGE = "language."
Bounds = tuple[int, ...]
STATE: Final = ("exp_avg", "exp_avg_sq", "step")
"""what Adam has of a parameter"""


class SavedBox(NamedTuple):
    """A box of a global tensor."""

    start: Bounds
    data: Tensor
    """elements of the box, mapped from the file"""
    file: Path

    @property
    def size(self) -> Bounds:
        """Shape of the box."""
        return tuple(self.data.shape)

    def __str__(self) -> str:
        return f"{list(self.size)} at {list(self.start)} in {self.file}"


class SavedTensor:
    """A global tensor out of a checkpoint, in boxes that do not overlap."""

    def __init__(self, name: str, shape: Bounds, dtype: torch.dtype, file: Path) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.file = file
        """the first that has a part of it"""
        self._boxes: dict[tuple[Bounds, Bounds], SavedBox] = {}

    @property
    def boxes(self) -> list[SavedBox]:
        """The boxes; several that are the same count as one."""
        return list(self._boxes.values())

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def add(self, shape: Bounds, box: SavedBox) -> None:
        """Add a box of a tensor that has this shape; several ranks may have stored the same one.

        Raises `CheckpointError` for a box of another tensor, outside of it, or with other content
        than the same box in another file.
        """
        if (shape, box.data.dtype) != (self.shape, self.dtype):
            raise CheckpointError(
                f"{self.name!r} is {self.dtype} {list(self.shape)} in {self.file}, but "
                f"{box.data.dtype} {list(shape)} in {box.file}: {_OF_ONE}"
            )
        ends = [first + extent for first, extent in zip(box.start, box.size, strict=False)]
        inside = all(0 <= a <= b <= n for a, b, n in zip(box.start, ends, shape, strict=False))
        if not len(box.start) == len(box.size) == len(shape) or not inside:
            raise CheckpointError(
                f"{self.name!r}, {list(shape)}, has a box outside of it: {box}: {_ELSEWHERE}"
            )
        if not box.data.numel():
            return
        first = self._boxes.setdefault((box.start, box.size), box)
        if first is not box and not _same_bytes(first.data, box.data):
            raise CheckpointError(
                f"{self.name!r} has other elements in {first.file} than in {box.file}, for the box "
                f"{list(box.size)} at {list(box.start)}: {_ELSEWHERE}"
            )

    def fill(self, target: Tensor, start: Bounds) -> None:
        """Copy the box that begins at ``start`` and has the target's shape into the target: all of
        it, where it lies inside of the tensor."""
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
        made = torch.empty(self.shape, dtype=self.dtype)  # the boxes cover it: `_check_covered`
        self.fill(made, (0,) * len(self.shape))
        return made


class Saved(NamedTuple):
    """A checkpoint that was read."""

    folder: Path
    strategy: SavedStrategy
    tensors: dict[str, SavedTensor]
    own: list[dict[str, Any]]
    """values besides tensors of each rank that wrote"""
    aliases: dict[str, str]
    metadata: Metadata | None
    """metadata of the folder; None for format 1"""


Wanted = Callable[[int], bool]


def read_checkpoint(path: Path, checked: Wanted = lambda _: True) -> Saved:
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
    _check_covered(list(found.values()))
    _check_moments(found)
    _check_aliases(folder, metadata.aliases, found)
    return Saved(folder, metadata.strategy, found, own, metadata.aliases, metadata)


def check_file(folder: Path, record: FileRecord, *, summed: bool = True) -> None:
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
_OF_ONE = "the files are not of one checkpoint; use another, or restore them"


def load_plain(target: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read plain values and tensors that torch saved; `CheckpointError` for anything else."""
    try:
        with _no_other_objects():
            content = torch.load(target, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:
        # torch's own text recommends to switch off the protection, so it is not shown.
        raise CheckpointError(
            f"{target} holds more than tensors and plain values, so it is not loaded: it was not "
            "written by save_checkpoint()"
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"{target} is damaged: {error}; {_ELSEWHERE}") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{target} holds a {type(content).__name__} in place of a rank's own values: it was "
            "not written by save_checkpoint()"
        )
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
    """Add the boxes of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            layout = msgspec.json.decode((file.metadata() or {}).get(LAYOUT, ""), type=FileLayout)
            names = list(file.keys())
            if set(names) != layout.boxes.keys():
                other = min(set(names) ^ layout.boxes.keys())
                raise CheckpointError(f"{path} has no boxes for {other!r}, or only those")
            for name in names:
                _add_boxes(path, name, file.get_tensor(name), layout, found)
    except (SafetensorError, msgspec.DecodeError, KeyError) as error:
        raise CheckpointError(f"{path} is not a file of a checkpoint: {error}") from error


def _add_boxes(
    path: Path, name: str, stored: Tensor, layout: FileLayout, found: dict[str, SavedTensor]
) -> None:
    """Add the boxes of a tensor of a file, which lie in it one behind the other."""
    flat, end = stored.reshape(-1), 0
    if len(flat) and not layout.boxes[name]:
        raise CheckpointError(f"{path} is damaged: it does not say what {name!r} is; {_ELSEWHERE}")
    for box in sorted(layout.boxes[name], key=lambda one: one.offset):
        if min(box.size, default=0) < 0 or not end <= box.offset <= len(flat) - box.elements:
            raise CheckpointError(
                f"{path} is damaged: {name!r} has {len(flat)} elements, and in them the box "
                f"{list(box.size)} of {box.tensor!r} at {box.offset}, behind one that ends at "
                f"{end}; {_ELSEWHERE}"
            )
        end = box.offset + box.elements
        shape = layout.shapes[box.tensor]
        tensor = found.setdefault(box.tensor, SavedTensor(box.tensor, shape, stored.dtype, path))
        tensor.add(shape, SavedBox(box.start, flat[box.offset : end].view(box.size), path))


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    first, second = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)


def _check_covered(tensors: Sequence[SavedTensor]) -> None:
    """Raise `CheckpointError` unless each element of each tensor is in exactly one box.

    That is so where no two boxes overlap, and together they have as many elements.
    """
    for one in tensors:
        missing = one.elements - sum(box.data.numel() for box in one.boxes)
        if missing > 0:
            raise CheckpointError(
                f"{one.name!r}: {missing} of its {one.elements} elements are in no file of "
                f"{one.file.parent}: {_OF_ONE}"
            )
    every = [box for one in tensors for box in one.boxes]
    table = np.array([number for number, one in enumerate(tensors) for _ in one.boxes], np.int64)
    dims = max([1, *(len(one.shape) for one in tensors)])
    start, size = np.zeros((len(every), dims), np.int64), np.ones((len(every), dims), np.int64)
    for row, box in enumerate(every):
        start[row, : len(box.start)], size[row, : len(box.start)] = box.start, box.size
    order = ordered_by([table, *start.T])
    first, second = overlapping(Boxes(table, start, size).take(order), len(tensors))
    if len(first):
        row, other = int(order[first[0]]), int(order[second[0]])
        raise CheckpointError(
            f"{tensors[table[row]].name!r} has two boxes that overlap: {every[row]}, and "
            f"{every[other]}: {_ELSEWHERE}"
        )


def _check_moments(found: Mapping[str, SavedTensor]) -> None:
    """Raise `CheckpointError` for a parameter that has a part of Adam's state."""
    for name, one in found.items():
        parameter, _, kind = name.rpartition(".")
        if not name.startswith(MOMENTS) or kind not in STATE:
            continue
        missing = [each for each in STATE if f"{parameter}.{each}" not in found]
        if missing:
            raise CheckpointError(
                f"the optimizer's state of {parameter.removeprefix(MOMENTS)!r} is incomplete: "
                f"{one.file} has its {kind}, no file has its {' and '.join(missing)}: {_OF_ONE}"
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
        path = folder / record.name
        check_file(folder, record, summed=checked(number))
        content = load_plain(path, mmap=True)
        try:
            for name, entry in content.pop("state").items():
                data, rows = entry["data"], entry["rows"]
                shape = tuple(data.shape) if rows < 0 else (rows, *data.shape[1:])
                start = (entry["start"], *(0,) * (data.ndim - 1))[: data.ndim]
                tensor = found.setdefault(name, SavedTensor(name, shape, data.dtype, path))
                tensor.add(shape, SavedBox(start, data, path))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is not a file of a checkpoint: {error}") from error
        own.append(content)
    _check_covered(list(found.values()))
    _check_moments(found)
    return Saved(folder, SavedStrategy(dp=metadata.world_size), found, own, {}, None)


CONFIG = "config.json"


class Kind(NamedTuple):
    """Weights, or one kind of moments: the prefix and suffix of a parameter's name."""

    prefix: str
    suffix: str = ""

    def inner(self, name: str) -> str | None:
        """Return the parameter's name, or None for a name of another kind."""
        if name.startswith(self.prefix) and name.endswith(self.suffix):
            return name[len(self.prefix) : len(name) - len(self.suffix)]
        return None

    def outer(self, name: str) -> str:
        """Return the name in the checkpoint."""
        return f"{self.prefix}{name}{self.suffix}"


OF_WEIGHTS = Kind(WEIGHTS + LANGUAGE)
KINDS = (
    OF_WEIGHTS,
    Kind(MOMENTS + LANGUAGE, ".exp_avg"),
    Kind(MOMENTS + LANGUAGE, ".exp_avg_sq"),
)


def model_files(saved: Saved) -> dict[str, Path]:
    """Return configuration and tokenizer of the checkpoint, by name. Raises `CheckpointError`."""
    found: dict[str, Path] = {}
    for record in saved.metadata.model if saved.metadata is not None else ():
        check_file(saved.folder, record)
        found[record.name.removeprefix(f"{MODEL_FOLDER}/")] = saved.folder / record.name
    return found


def read_config(path: Path) -> dict[str, Any]:
    """Return a Hugging Face configuration. Raises `CheckpointError`."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return config


def decoder_of(config: Mapping[str, Any]) -> DecoderSizes | None:
    """Return the decoder of a configuration; None where there is no name map for it."""
    if config.get("model_type") not in ARCHITECTURES:
        return None
    try:
        return DecoderSizes.from_config(config)
    except ModelMismatch:
        return None


def foreign(names: Iterable[str]) -> list[str]:
    """Return the weights that do not belong to a causal language model: a critic's, a policy's."""
    return [
        name.removeprefix(WEIGHTS)
        for name in names
        if name.startswith(WEIGHTS) and not name.startswith(WEIGHTS + LANGUAGE)
    ]


HEAD = "lm_head.weight"


class MappedBox(NamedTuple):
    """Place of a tensor of the name map in a checkpoint: a box of a stored tensor."""

    tensor: str
    start: tuple[int, ...]

    def box(self, piece: Piece) -> Box:
        """Return a piece of the tensor as a box of the stored one."""
        missing = len(self.start) - len(piece.start)
        start = (0,) * missing + piece.start
        size = (1,) * missing + piece.size
        moved = tuple(a + b for a, b in zip(self.start, start, strict=True))
        return Box(self.tensor, moved, size, piece.offset)


class NamedParameters(NamedTuple):
    """A checkpoint's tensors as parameters that can be cut."""

    model: Model
    places: Mapping[str, MappedBox] = {}
    """places of the tensors that are stored under another name"""
    aliases: Mapping[str, str] = {}
    """tied tensors that were stored twice: name -> the name that is kept"""

    def box(self, piece: Piece) -> Box:
        """Return a piece of a tensor as a box of a stored one."""
        place = self.places.get(piece.tensor)
        return Box(*piece) if place is None else place.box(piece)


def by_name_map(saved: Saved, files: Mapping[str, Path]) -> NamedParameters:
    """Return the parameters of a language model's trainer: a policy's or a critic's.

    Args:
        saved: the checkpoint.
        files: configuration and tokenizer of the model, by name.

    Raises:
        CheckpointError: there is no name map for it.
        ModelMismatch: its tensors do not match its configuration.
    """
    decoder, kind = _decoder(saved, files)
    base = huggingface(decoder)
    names = {name for name, one in saved.tensors.items() if one.shape}
    if any(map(is_of_adapter, names)):
        raise CheckpointError(
            f"{saved.folder} holds an adapter (LoRA), which tensor-parallel ranks do not cut: use "
            "tp=1"
        )
    critic = bool(foreign(names))
    aliases = dict(_tied_copies(decoder, names))
    names -= aliases.keys()
    _check_shapes(saved, base, names, without={HEAD} if critic else set())
    parameters: list[Parameter] = []
    places: dict[str, MappedBox] = {}
    for one in KINDS:
        held = {inner for name in names if (inner := one.inner(name)) is not None}
        mine = Model(tuple(part for part in base.parameters if part.name in held), base.layers)
        parameters += [_renamed(part, one.outer) for part in mine.parameters]
        places |= {
            one.outer(name): place._replace(tensor=one.outer(place.tensor))
            for name, place in _fused(mine).items()
        }
    parameters += [
        Parameter(name=name, tensors=(GlobalTensor(name, saved.tensors[name].shape),))
        for name in sorted(names)
        if critic and not name.startswith((WEIGHTS + LANGUAGE, MOMENTS + LANGUAGE))
    ]
    unknown = names - {one.name for one in parameters}
    if unknown:
        name = min(unknown)
        near = nearest_names(name, [one.name for one in parameters])
        raise CheckpointError(
            f"{saved.folder} holds {name!r}, which is not in the name map of {kind}{near}: use tp=1"
        )
    return NamedParameters(Model(tuple(parameters), base.layers), places, aliases)


def _decoder(saved: Saved, files: Mapping[str, Path]) -> tuple[DecoderSizes, str]:
    if CONFIG not in files:
        raise CheckpointError(
            f"{saved.folder} does not say which language model it holds (no {MODEL_FOLDER}/"
            f"{CONFIG}), and only the name map of a decoder says how tensor-parallel ranks cut it: "
            "use tp=1"
        )
    config = read_config(files[CONFIG])
    kind = str(config.get("model_type"))
    decoder = decoder_of(config)
    if decoder is None:
        raise CheckpointError(
            f"there is no name map to cut model_type {kind!r} of {saved.folder} over "
            f"tensor-parallel ranks; there are for {', '.join(ARCHITECTURES)}: use tp=1"
        )
    return decoder, kind


def _tied_copies(decoder: DecoderSizes, names: set[str]) -> Iterator[tuple[str, str]]:
    """Output layers that are tied to the embedding and were stored all the same."""
    if decoder.tied:
        for kind in KINDS:
            if kind.outer(HEAD) in names:
                yield kind.outer(HEAD), kind.outer("model.embed_tokens.weight")


def _check_shapes(saved: Saved, base: Model, names: set[str], without: set[str]) -> None:
    """Compare the weights with those of the decoder, experts fused."""
    stored = {one.name: one.shape for one in layout(base, ParallelStrategy()).of_rank(0)}
    expected = {name: shape for name, shape in stored.items() if name not in without}
    held = {inner for name in names if (inner := OF_WEIGHTS.inner(name)) is not None}
    Model.of(expected).check_shapes(
        {name: saved.tensors[OF_WEIGHTS.outer(name)].shape for name in held}
    )


def _fused(model: Model) -> dict[str, MappedBox]:
    """The places of the tensors that share a parameter with others."""
    found: dict[str, MappedBox] = {}
    for buffer in layout(model, ParallelStrategy()).of_rank(0):
        for piece in buffer.pieces:
            if piece.tensor != buffer.name:
                start = np.unravel_index(piece.offset, buffer.shape)
                found[piece.tensor] = MappedBox(buffer.name, tuple(map(int, start)))
    return found


def _renamed(one: Parameter, outer: Callable[[str], str]) -> Parameter:
    tensors = tuple(msgspec.structs.replace(part, name=outer(part.name)) for part in one.tensors)
    return msgspec.structs.replace(one, name=outer(one.name), tensors=tensors, tied_to=None)
