"""A checkpoint's folder made into another one: for transformers and vLLM (`Export`), or for other
ranks, to resume from (`Resharding`).

::

    Export: weights alone                   Resharding: a checkpoint, or a run at its newest one

    OUT                                     IN                            OUT
    model-00001-of-00003.safetensors, ...   checkpoint/                   checkpoint/
    model.safetensors.index.json              actor's files                 cut by the new layout
    config.json, generation_config.json,      critic/, a checkpoint too     likewise
    tokenizer files                           run.msgpack                   copied, as all else
                                            run/                          run/
                                              checkpoints/version-000010/   as above
                                              checkpoints/latest.json       copied
                                              (older checkpoints)           --
                                              everything else, not hidden   copied

IN is only read; OUT gets its name when all of it is on the disk. One tensor at a time is in memory.

An export has the names and shapes that checkpoints of the architecture have: experts, which
transformers keeps fused in memory, are stored one by one; tied weights are stored once; a small
model is one file without index. An adapter (LoRA) is merged into the weights, and stands in the
folder ``adapter`` as well.

In a resharded checkpoint ``dp`` alone cuts every tensor by FSDP2's rows, for which the model need
not be known. ``tp`` cuts by the name map of the folder's decoder; a rank's file then holds its
slices, under the names of transformers, with the boxes that each is made of. The rank's own values
of each rank of the run are copied unchanged. The metadata that marks a checkpoint as complete is
written last.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from rlinf_async.backends.checkpoint import folders as notes
from rlinf_async.backends.checkpoint.folders import (
    METADATA,
    MODEL_FOLDER,
    CheckpointError,
    FileRecord,
    Metadata,
    being_read,
    find_checkpoint,
    newest_note,
    newest_of_run,
    own_file,
    sync,
    tensor_file,
    write_whole,
)
from rlinf_async.backends.checkpoint.reading import (
    CONFIG,
    OF_WEIGHTS,
    NamedParameters,
    Saved,
    by_name_map,
    foreign,
    model_files,
    read_checkpoint,
    read_config,
)
from rlinf_async.backends.checkpoint.streaming import (
    Advance,
    Copies,
    copy_file,
    new_folder,
    visible,
    write_tensors,
)
from rlinf_async.backends.checkpoint.tensor_file import (
    DTYPES,
    Box,
    TensorEntry,
    header,
    in_file_order,
    write_file,
)
from rlinf_async.backends.language_training.lora import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    LowRank,
    factors_of,
    is_of_adapter,
    low_rank,
    scale_of,
    write_adapter,
)
from rlinf_async.backends.transformers.tensors import ModelTensors, Slice
from rlinf_async.parallel import FSDP2, Layout, Model, Replicated, Strategy, layout

SHARD_BYTES = 5_000_000_000
NO_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json", "*.pt", "*.pth", "*.gguf")


class Exported(NamedTuple):
    """The result of an export."""

    folder: Path
    tensors: int
    bytes: int


class Export:
    """One export. `run` writes it; ``total_bytes`` is its size.

    Args:
        checkpoint: a checkpoint's folder, or that of a run: its newest.
        dtype: dtype of floating-point weights; unchanged when left out.
        model: folder with configuration and tokenizer; those of the checkpoint when left out.
        shard_bytes: largest size of one file, unless a single tensor is larger.

    Raises `CheckpointError` for a checkpoint that is damaged or of no language model.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        dtype: torch.dtype | None = None,
        model: Path | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.checkpoint = self._folder = find_checkpoint(newest_of_run(checkpoint))
        """the checkpoint's own folder"""
        self._dtype = dtype
        self._shard_bytes = shard_bytes
        with being_read(self._folder):
            self._saved = read_checkpoint(self._folder)
            self._files = _files(self._saved, model)
            self._adapter = _adapter(self._saved)
        self._config = read_config(self._files[CONFIG])
        self._slices = _slices(self._saved, self._config)
        self._shards = list(self._in_shards())
        self.total_bytes = sum(one.nbytes for shard in self._shards for one in shard)

    def run(self, out: Path, advance: Advance = lambda _: None) -> Exported:
        """Write the folder ``out``, which must not exist yet."""
        with being_read(self._folder), new_folder(out) as folder:
            places: dict[str, str] = {}
            for number, shard in enumerate(self._shards, start=1):
                name = self._shard_name(number)
                head = header(shard, about={"format": "pt"})
                write_tensors(folder, name, head, shard, self._make, advance)
                places |= {one.name: name for one in shard}
            if len(self._shards) > 1:
                self._write_index(folder, places)
            for name, source in self._files.items():
                if name != CONFIG:
                    write_file(folder, name, source.read_bytes())
            write_file(folder, CONFIG, _pretty(self._described()))
            if self._adapter is not None:
                factors = factors_of(self._adapter.updates).items()
                named = {name.removeprefix(OF_WEIGHTS.prefix): one for name, one in factors}
                write_adapter(named, self._adapter.described, folder / ADAPTER_FOLDER)
        return Exported(out, len(self._slices), self.total_bytes)

    def _make(self, entry: TensorEntry) -> Tensor:
        one = self._slices[entry.name]
        whole = self._saved.tensors[one.tensor].whole().contiguous()
        update = self._adapter.updates.get(one.tensor) if self._adapter is not None else None
        return one.of(whole if update is None else whole + update.whole()).to(entry.dtype)

    def _in_shards(self) -> Iterator[list[TensorEntry]]:
        shard: list[TensorEntry] = []
        for name, one in self._slices.items():
            stored = self._saved.tensors[one.tensor].dtype
            dtype = self._dtype if self._dtype is not None and stored.is_floating_point else stored
            entry = TensorEntry(name, dtype, one.shape)
            if shard and sum(one.nbytes for one in shard) + entry.nbytes > self._shard_bytes:
                yield in_file_order(shard)
                shard = []
            shard.append(entry)
        yield in_file_order(shard)

    def _shard_name(self, number: int) -> str:
        if len(self._shards) == 1:
            return "model.safetensors"
        return f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"

    def _write_index(self, folder: Path, places: dict[str, str]) -> None:
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": places}
        write_file(folder, "model.safetensors.index.json", _pretty(index))

    def _described(self) -> dict[str, Any]:
        """The configuration, with the dtype of the written weights."""
        dtypes = [one.dtype for shard in self._shards for one in shard if one.dtype in DTYPES]
        kept = {name: value for name, value in self._config.items() if name != "torch_dtype"}
        floating = [one for one in dtypes if one.is_floating_point]
        if floating:
            kept["dtype"] = str(max(floating, key=floating.count)).removeprefix("torch.")
        return kept


def _files(saved: Saved, model: Path | None) -> dict[str, Path]:
    """Configuration and tokenizer: from ``model``, else from the checkpoint."""
    if model is not None:
        weights = {path for pattern in NO_WEIGHTS for path in model.glob(pattern)}
        found = {one.name: one for one in sorted(model.glob("*")) if one.is_file()}
        found = {name: one for name, one in found.items() if one not in weights}
        if CONFIG not in found:
            raise CheckpointError(f"{model} holds no {CONFIG}: name the folder of the model")
        return found
    found = {name: one for name, one in model_files(saved).items() if name != ADAPTER_CONFIG}
    if CONFIG not in found:
        raise CheckpointError(
            f"{saved.folder} does not say which language model it holds (no model/{CONFIG}): name "
            "the folder that the training began with by --model, if it is of one"
        )
    return found


class _Adapter(NamedTuple):
    """An adapter in a checkpoint."""

    updates: dict[str, LowRank]
    """updates by the checkpoint's names of the weights"""
    described: bytes
    """``adapter_config.json``"""


def _adapter(saved: Saved) -> _Adapter | None:
    """Return the adapter of a checkpoint; None where it has none."""
    names = [name for name in saved.tensors if OF_WEIGHTS.inner(name) and is_of_adapter(name)]
    if not names:
        return None
    file = model_files(saved).get(ADAPTER_CONFIG)
    if file is None:
        raise CheckpointError(
            f"{saved.folder} holds {names[0]!r} of an adapter, but no {MODEL_FOLDER}/"
            f"{ADAPTER_CONFIG}, which says by what its update is multiplied"
        )
    described = file.read_bytes()
    factors = {name: saved.tensors[name].whole() for name in names}
    return _Adapter(low_rank(factors, scale_of(described)), described)


def _slices(saved: Saved, config: dict[str, Any]) -> dict[str, Slice]:
    """Return where each tensor of the export lies in the tensors of the checkpoint.

    Raises `CheckpointError` for a checkpoint of something else than the configuration's model.
    """
    others = foreign(saved.tensors)
    if others:
        raise CheckpointError(
            f"{saved.folder} holds {others[0]!r}, which is no part of a causal language model: a "
            "critic cannot be exported, and a policy for robots by its run's folder alone"
        )
    weights = {
        inner: name
        for name in saved.tensors
        if (inner := OF_WEIGHTS.inner(name)) is not None and not is_of_adapter(name)
    }
    if not weights:
        raise CheckpointError(f"{saved.folder} holds no language model")
    tensors = _tensors_of(saved, config)
    for name, expected in tensors.memory.items():
        if name not in weights and name not in tensors.tied:
            raise CheckpointError(
                f"{saved.folder} lacks {name!r}, which {CONFIG} asks for: they are of different "
                "models"
            )
        if name in weights and saved.tensors[weights[name]].shape != tuple(expected.shape):
            raise CheckpointError(
                f"{name!r} is {list(saved.tensors[weights[name]].shape)} in {saved.folder}, but "
                f"{list(expected.shape)} by {CONFIG}"
            )
        if name in weights and not saved.tensors[weights[name]].dtype.is_floating_point:
            raise CheckpointError(
                f"{name!r} is {saved.tensors[weights[name]].dtype} in {saved.folder}: no weight"
            )
    unknown = weights.keys() - tensors.memory.keys()
    if unknown:
        raise CheckpointError(
            f"{saved.folder} holds {min(unknown)!r}, which {CONFIG} does not know: they are of "
            "different models"
        )
    return {
        name: one._replace(tensor=weights[one.tensor]) for name, one in tensors.published().items()
    }


def _tensors_of(saved: Saved, config: dict[str, Any]) -> ModelTensors:
    try:
        return ModelTensors(config)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "exporting a language model needs the package 'transformers': "
            "pip install 'rlinf-async[llm]'"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{saved.folder} cannot be exported: transformers has no model for its {CONFIG} "
            f"({error})"
        ) from error


def _pretty(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


class Resharded(NamedTuple):
    """The result of a resharding."""

    folder: Path
    ranks: int
    bytes: int
    """bytes written, without metadata"""
    cut: tuple[str, ...]
    """names of the checkpoints inside the checkpoint that were resharded too, such as a critic's"""
    copied: tuple[str, ...]
    """names of the other files that were copied, such as a run's position"""
    of_run: bool
    """whether it is a run's folder"""


class Resharding:
    """One resharding. `run` writes it; ``total_bytes`` is known before.

    Args:
        path: a checkpoint's folder; or that of a run, or of its checkpoints, for the newest.
        dp: ranks that share each tensor's rows.
        tp: tensor-parallel ranks.

    Raises `CheckpointError` for a folder that is damaged, or whose tensors are not known where that
    is needed, and `StrategyError` for sizes that do not divide, with the nearest that do.
    """

    def __init__(self, path: Path, *, dp: int, tp: int) -> None:
        self._path = path
        self._newest = newest_note(path)
        checkpoint = path if self._newest is None else self._newest.checkpoint
        self._inside = Path() if self._newest is None else checkpoint.relative_to(path)
        self._folder = find_checkpoint(checkpoint)
        with being_read(self._folder):
            self._cutting = Cutting(self._folder, dp=dp, tp=tp)
        self._of_run = len(self._inside.parts) > 1
        around = set(visible(path)) - {self._inside.parts[0]} if self._of_run else set[str]()
        self._around = Copies(path, around)
        self.total_bytes = self._cutting.total_bytes + self._around.total_bytes

    def run(self, out: Path, advance: Advance = lambda _: None) -> Resharded:
        """Write the folder ``out``, which must not exist yet."""
        if out.resolve().is_relative_to(self._path.resolve()):
            raise CheckpointError(
                f"{out} lies inside {self._path}, which is only read: name a folder elsewhere"
            )
        with being_read(self._folder), new_folder(out) as folder:
            target = folder / self._inside
            target.mkdir(parents=True, exist_ok=True)
            self._cutting.write(target, advance)
            self._around.write(folder, advance)
            if self._newest is not None:
                note = folder / self._newest.note.relative_to(self._path)
                sync(note.parent)
                write_whole(note, self._newest.content)
        made = self._cutting
        return Resharded(
            out,
            made.ranks,
            self.total_bytes,
            tuple(made.inner),
            made.copies.names,
            of_run=self._of_run,
        )


class Cutting:
    """A checkpoint's folder with everything in it, resharded. `write` writes it; ``total_bytes`` is
    known before.

    Args:
        folder: the checkpoint's folder.
        dp: ranks that share each tensor's rows.
        tp: tensor-parallel ranks.

    Raises `CheckpointError` for a folder that is damaged, or whose tensors are not known where that
    is needed, and `StrategyError` for sizes that do not divide, with the nearest that do.
    """

    def __init__(self, folder: Path, *, dp: int, tp: int) -> None:
        self._strategy = notes.SavedStrategy(dp=dp, tp=tp)
        self.ranks = dp * tp
        with being_read(folder):
            self._saved = read_checkpoint(folder)
            self._model_files = model_files(self._saved)
        self._folder = self._saved.folder
        tensors = self._saved.tensors
        if tp > 1:
            named = by_name_map(self._saved, self._model_files)
        else:
            shapes = {name: one.shape for name, one in tensors.items() if one.shape}
            named = NamedParameters(Model.of(shapes))
        self._aliases = {**self._saved.aliases, **named.aliases}
        sharding = FSDP2() if dp > 1 else Replicated()
        found = layout(named.model, Strategy(dp=dp, tp=tp, sharding=sharding))
        self._files = [
            in_file_order(self._entries(found, named, rank)) for rank in range(self.ranks)
        ]
        beside = set(visible(folder)) - self._own_names()
        checkpoints = sorted(one for one in beside if (folder / one / METADATA).is_file())
        self.inner = {one: Cutting(folder / one, dp=dp, tp=tp) for one in checkpoints}
        self.copies = Copies(folder, beside - self.inner.keys())
        self.total_bytes: int = (
            sum(one.nbytes for file in self._files for one in file)
            + self.copies.total_bytes
            + sum(one.total_bytes for one in self.inner.values())
        )

    def write(self, folder: Path, advance: Advance) -> None:
        """Write into an empty folder. The metadata, which marks it as complete, comes last."""
        tensors = [
            self._write(folder, tensor_file(rank, self.ranks), entries, advance)
            for rank, entries in enumerate(self._files)
        ]
        note = Metadata(
            strategy=self._strategy,
            tensors=tuple(tensors),
            own=tuple(self._write_own(folder)),
            model=self._copy_model(folder),
            aliases=self._aliases,
        )
        for name, one in self.inner.items():
            (folder / name).mkdir()
            one.write(folder / name, advance)
        self.copies.write(folder, advance)
        sync(folder)
        write_whole(folder / METADATA, notes.encode(note))

    def _own_names(self) -> set[str]:
        """The trainer's own files and folders in its folder."""
        known, ranks = self._saved.metadata, len(self._saved.own)
        if known is None:
            files = {own_file(rank, ranks) for rank in range(ranks)}
        else:
            files = {one.name for one in (*known.tensors, *known.own)}
        return files | {METADATA, MODEL_FOLDER}

    def _entries(self, found: Layout, named: NamedParameters, rank: int) -> Iterator[TensorEntry]:
        saved = self._saved.tensors
        for buffer in found.of_rank(rank):
            boxes = tuple(named.box(piece) for piece in buffer.pieces)
            yield TensorEntry(buffer.name, saved[buffer.name].dtype, buffer.shape, boxes)
        if rank == 0:
            for name, one in saved.items():
                if not one.shape:
                    yield TensorEntry(name, one.dtype, (), (Box(name, (), (), 0),))

    def _write(
        self, folder: Path, name: str, entries: list[TensorEntry], advance: Advance
    ) -> FileRecord:
        shapes = {one.name: self._saved.tensors[one.name].shape for one in entries}
        head = header(entries, shapes)
        return write_tensors(folder, name, head, entries, self._make, advance)

    def _make(self, entry: TensorEntry) -> Tensor:
        made = torch.zeros(entry.shape, dtype=entry.dtype)
        flat = made.reshape(-1)
        for box in entry.boxes:
            view = flat[box.offset : box.offset + math.prod(box.size)].view(box.size)
            self._saved.tensors[box.tensor].fill(view, box.start)
        return made

    def _write_own(self, folder: Path) -> Iterator[FileRecord]:
        if self._saved.metadata is not None:
            for record in self._saved.metadata.own:
                yield self._copy(folder, record)
            return
        for rank, own in enumerate(self._saved.own):
            content = io.BytesIO()
            torch.save(own, content)
            yield write_file(folder, own_file(rank, len(self._saved.own)), content.getvalue())

    def _copy_model(self, folder: Path) -> tuple[FileRecord, ...]:
        if self._saved.metadata is None or not self._model_files:
            return ()
        (folder / MODEL_FOLDER).mkdir()
        records = tuple(self._copy(folder, one) for one in self._saved.metadata.model)
        sync(folder / MODEL_FOLDER)
        return records

    def _copy(self, folder: Path, record: FileRecord) -> FileRecord:
        """Copy a file, and check that it is the recorded one."""
        copied = copy_file(self._folder, folder, record.name)
        if copied != record:
            raise CheckpointError(f"{self._folder / record.name} was changed while it was copied")
        return copied
