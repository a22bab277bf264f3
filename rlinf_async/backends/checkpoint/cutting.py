"""One trainer's checkpoint folder, resharded for other ranks, one tensor at a time.

::

    any folder --read: boxes of global tensors--> cut by the new layout --> one file for each rank

``dp`` alone cuts every tensor by FSDP2's rows, for which the model need not be known. ``tp`` cuts
by the name map of the folder's decoder (`name_map`); a rank's file then holds its slices, under the
names of transformers, with the boxes that each is made of. Both are read back by the same command
and by trainers. The rank's own values of each rank of the run are copied unchanged.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rlinf_async.backends.checkpoint import metadata as notes
from rlinf_async.backends.checkpoint.copying import copy_file
from rlinf_async.backends.checkpoint.errors import CheckpointError
from rlinf_async.backends.checkpoint.folders import (
    being_read,
    own_file,
    sync,
    tensor_file,
    write_whole,
)
from rlinf_async.backends.checkpoint.language_model import model_files
from rlinf_async.backends.checkpoint.metadata import METADATA, MODEL_FOLDER, FileRecord, Metadata
from rlinf_async.backends.checkpoint.name_map import Named, by_name_map
from rlinf_async.backends.checkpoint.reading import read_checkpoint
from rlinf_async.backends.checkpoint.streaming import Advance, write_tensors
from rlinf_async.backends.checkpoint.tensor_file import (
    Box,
    Entry,
    header,
    in_file_order,
    write_file,
)
from rlinf_async.parallel import FSDP2, Layout, Model, Replicated, Strategy, layout


class Cutting:
    """One trainer's checkpoint, resharded. `write` writes it; ``total_bytes`` is known before.

    Args:
        folder: of the checkpoint.
        dp: ranks that share each tensor's rows.
        tp: tensor-parallel ranks.

    Raises `CheckpointError` for a folder that is damaged, or whose tensors are not known where that
    is needed, and `StrategyError` for sizes that do not divide, with the nearest that do.
    """

    def __init__(self, folder: Path, *, dp: int, tp: int) -> None:
        self._strategy = notes.Strategy(dp=dp, tp=tp)
        strategy = Strategy(dp=dp, tp=tp, sharding=FSDP2() if dp > 1 else Replicated())
        with being_read(folder):
            self._saved = read_checkpoint(folder)
            self._model_files = model_files(self._saved)
        self._folder = self._saved.folder
        named = self._named(tp)
        self._aliases = {**self._saved.aliases, **named.aliases}
        found = layout(named.model, strategy)
        self._files = [in_file_order(self._entries(found, named, rank)) for rank in range(dp * tp)]
        self.total_bytes = sum(one.nbytes for file in self._files for one in file)

    @property
    def ranks(self) -> int:
        """The number of files of tensors in the result."""
        return len(self._files)

    @property
    def names(self) -> set[str]:
        """The trainer's own files and folders in its folder."""
        known = self._saved.metadata
        of_format_1 = {own_file(rank, self._ranks_before) for rank in range(self._ranks_before)}
        files = {one.name for one in (*known.tensors, *known.own)} if known else of_format_1
        return files | {METADATA, MODEL_FOLDER}

    def write(self, folder: Path, advance: Advance) -> None:
        """Write into an empty folder. It is complete when `finish` has been called."""
        tensors = [
            self._write(folder, tensor_file(rank, self.ranks), entries, advance)
            for rank, entries in enumerate(self._files)
        ]
        self._note = Metadata(
            strategy=self._strategy,
            tensors=tuple(tensors),
            own=tuple(self._write_own(folder)),
            model=self._copy_model(folder),
            aliases=self._aliases,
        )

    def finish(self, folder: Path) -> None:
        """Write the metadata, which marks the folder as a complete checkpoint."""
        sync(folder)
        write_whole(folder / METADATA, notes.encode(self._note))

    @property
    def _ranks_before(self) -> int:
        return len(self._saved.own)

    def _named(self, tp: int) -> Named:
        if tp > 1:
            return by_name_map(self._saved, self._model_files)
        tensors = self._saved.tensors
        return Named(Model.of({name: one.shape for name, one in tensors.items() if one.shape}))

    def _entries(self, found: Layout, named: Named, rank: int) -> Iterator[Entry]:
        saved = self._saved.tensors
        for buffer in found.of_rank(rank):
            boxes = tuple(named.box(piece) for piece in buffer.pieces)
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
                yield self._copy(folder, record)
            return
        for rank, own in enumerate(self._saved.own):
            content = io.BytesIO()
            torch.save(own, content)
            yield write_file(folder, own_file(rank, self._ranks_before), content.getvalue())

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
