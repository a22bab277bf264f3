"""A checkpoint folder as other ranks would have written it: offline, one tensor at a time.

::

    any folder --read: boxes of global tensors--> cut by the new layout --> one file for each rank

``dp`` alone cuts every tensor by FSDP2's rows: that needs to know nothing of the model. ``tp`` cuts
by the name map of the decoder that the folder says it is of; a rank's file then holds its slices,
under the names that transformers has, and says of each which box it is. Both are read back by the
same command and by trainers. What each rank of the run kept of its own goes along unchanged.
"""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from rlinf_async.backends.checkpoint import metadata as notes
from rlinf_async.backends.checkpoint.errors import CheckpointError
from rlinf_async.backends.checkpoint.folders import (
    being_read,
    find_checkpoint,
    newest_of_run,
    own_file,
    tensor_file,
    write_whole,
)
from rlinf_async.backends.checkpoint.language_model import (
    CONFIG,
    KINDS,
    OF_WEIGHTS,
    decoder_of,
    foreign,
    model_files,
    read_config,
)
from rlinf_async.backends.checkpoint.metadata import METADATA, MODEL_FOLDER, FileRecord, Metadata
from rlinf_async.backends.checkpoint.reading import check_file, read_checkpoint
from rlinf_async.backends.checkpoint.streaming import Advance, new_folder, write_tensors
from rlinf_async.backends.checkpoint.tensor_file import (
    Box,
    Entry,
    header,
    in_file_order,
    write_file,
)
from rlinf_async.parallel import (
    FSDP2,
    Layout,
    Model,
    Parameter,
    Replicated,
    Strategy,
    layout,
)
from rlinf_async.parallel.decoders import ARCHITECTURES, huggingface
from rlinf_async.parallel.errors import nearest_names


class Resharded(NamedTuple):
    """What was written."""

    folder: Path
    ranks: int
    bytes: int
    left: tuple[str, ...]
    """names of what lies beside the checkpoint's own files in its folder, and was not taken along:
    a run's (its position, a critic's checkpoint)"""


class Resharding:
    """One resharding. `run` writes it; ``total_bytes`` is known before.

    Args:
        checkpoint: a checkpoint's folder, or that of a run: its newest.
        dp: ranks that share each tensor's rows.
        tp: tensor-parallel ranks.

    Raises `CheckpointError` for a folder that is damaged, or whose tensors are not known where that
    is needed, and `StrategyError` for sizes that do not divide, with the nearest that do.
    """

    def __init__(self, checkpoint: Path, *, dp: int, tp: int) -> None:
        self._strategy = notes.Strategy(dp=dp, tp=tp)
        sharding = FSDP2() if dp > 1 else Replicated()
        strategy = Strategy(dp=dp, tp=tp, sharding=sharding)
        self._folder = find_checkpoint(newest_of_run(checkpoint))
        with being_read(self._folder):
            self._saved = read_checkpoint(self._folder)
            self._model_files = model_files(self._saved)
        whole = {name: one for name, one in self._saved.tensors.items() if one.shape}
        model = Model.of({name: one.shape for name, one in whole.items()})
        self._aliases = dict(self._saved.aliases)
        if tp > 1:
            model = self._by_name_map(set(whole))
        self._layout: Layout = layout(model, strategy)
        self._files = [in_file_order(self._entries(rank)) for rank in range(dp * tp)]
        self.total_bytes = sum(one.nbytes for file in self._files for one in file)

    def run(self, out: Path, advance: Advance = lambda _: None) -> Resharded:
        """Write the folder ``out``, which must not be there yet."""
        with being_read(self._folder), new_folder(out) as folder:
            ranks = len(self._files)
            tensors = [
                self._write(folder, tensor_file(rank, ranks), entries, advance)
                for rank, entries in enumerate(self._files)
            ]
            own = tuple(self._write_own(folder))
            note = Metadata(
                strategy=self._strategy,
                tensors=tuple(tensors),
                own=own,
                model=self._copy_model(folder),
                aliases=self._aliases,
            )
            write_whole(folder / METADATA, notes.encode(note))
            left = self._beside()
        return Resharded(out, ranks, self.total_bytes, left)

    def _beside(self) -> tuple[str, ...]:
        known = self._saved.metadata
        if known is None:
            return ()
        files = {one.name for one in (*known.tensors, *known.own)} | {METADATA, MODEL_FOLDER}
        found = (one.name for one in self._folder.iterdir() if not one.name.startswith("."))
        return tuple(sorted(name for name in found if name not in files))

    def _entries(self, rank: int) -> Iterator[Entry]:
        saved = self._saved.tensors
        for buffer in self._layout.of_rank(rank):
            boxes = tuple(Box(*piece) for piece in buffer.pieces)
            yield Entry(buffer.name, saved[buffer.name].dtype, buffer.shape, boxes)
        if rank == 0:
            for name, one in saved.items():
                if not one.shape:
                    yield Entry(name, one.dtype, (), (Box(name, (), (), 0),))

    def _write(self, folder: Path, name: str, entries: list[Entry], advance: Advance) -> FileRecord:
        shapes = {one.name: self._saved.tensors[one.name].shape for one in entries}
        head = header(entries, shapes)
        return write_tensors(folder, name, head, entries, self._make, advance)

    def _make(self, entry: Entry) -> Tensor:
        made = torch.zeros(entry.shape, dtype=entry.dtype)
        flat = made.reshape(-1)
        for box in entry.boxes:
            view = flat[box.offset : box.offset + math.prod(box.size)].view(box.size)
            self._saved.tensors[box.tensor].fill(view, box.start)
        return made

    def _write_own(self, folder: Path) -> Iterator[FileRecord]:
        if self._saved.metadata is not None:
            for record in self._saved.metadata.own:
                check_file(self._folder, record)
                shutil.copyfile(self._folder / record.name, folder / record.name)
                yield record
            return
        for rank, own in enumerate(self._saved.own):
            content = io.BytesIO()
            torch.save(own, content)
            yield write_file(folder, own_file(rank, len(self._saved.own)), content.getvalue())

    def _copy_model(self, folder: Path) -> tuple[FileRecord, ...]:
        if self._saved.metadata is None or not self._model_files:
            return ()
        (folder / MODEL_FOLDER).mkdir()
        for name, source in self._model_files.items():
            shutil.copyfile(source, folder / MODEL_FOLDER / name)
        return self._saved.metadata.model

    def _by_name_map(self, names: set[str]) -> Model:
        """The decoder's parameters, and as many of their moments as there are."""
        if CONFIG not in self._model_files:
            raise CheckpointError(
                f"{self._folder} does not say of which language model it is (no "
                f"{MODEL_FOLDER}/{CONFIG}), and only the name map of a decoder says how tensor-"
                "parallel ranks cut it: use tp=1"
            )
        config = read_config(self._model_files[CONFIG])
        decoder = decoder_of(config)
        if decoder is None or decoder.experts:
            what = "experts" if decoder is not None else f"model_type {config.get('model_type')!r}"
            known = ", ".join(one for one in ARCHITECTURES if not one.endswith("_moe"))
            raise CheckpointError(
                f"there is no name map to cut {what} of {self._folder} over tensor-parallel ranks; "
                f"there are for {known}: use tp=1"
            )
        base = huggingface(decoder)
        if decoder.tied:
            for kind in KINDS:
                again = kind.outer("lm_head.weight")
                if again in names:
                    names.remove(again)
                    self._aliases[again] = kind.outer("model.embed_tokens.weight")
        parameters: list[Parameter] = []
        for kind in KINDS:
            held = {inner for name in names if (inner := kind.inner(name)) is not None}
            if kind is OF_WEIGHTS:
                shapes = {one: self._saved.tensors[kind.outer(one)].shape for one in held}
                base.check_shapes(shapes)
            parameters += [
                _renamed(one, kind.outer(one.name)) for one in base.parameters if one.name in held
            ]
        unknown = names - {one.name for one in parameters}
        if unknown:
            name = (foreign(sorted(unknown)) or sorted(unknown))[0]
            near = nearest_names(name, [one.name for one in parameters])
            raise CheckpointError(
                f"{self._folder} holds {name!r}, of which the name map of "
                f"{config['model_type']} knows nothing{near}: use tp=1"
            )
        return Model(tuple(parameters), base.layers)


def _renamed(one: Parameter, name: str) -> Parameter:
    [tensor] = one.tensors
    renamed = msgspec.structs.replace(tensor, name=name)
    return msgspec.structs.replace(one, name=name, tensors=(renamed,), tied_to=None)
