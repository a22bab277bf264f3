"""`CheckpointWriter`: one checkpoint at a time, written by a thread beside the training.

::

                       waits for                              unblocked by
    begin              the checkpoint before                  its thread
    optimizer step     the copy into host memory (`settle`)   the thread, which then only writes
    thread             the disk
    end of process     the thread, which is no daemon

    thread: copy -> tensors' file -> own file -> [rank 0: model's files] -> note
            -> whoever's note is the last: metadata, rename

An error of the thread is kept in the checkpoint's future; it is raised by whoever waits for it, and
by the next `begin` at the latest. Then the folder is not there, and the one before it still is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch

from rlinf_async.backends.checkpoint.folders import (
    own_file,
    rank_done,
    staging_folder,
    sync,
    tensor_file,
)
from rlinf_async.backends.checkpoint.metadata import MODEL_FOLDER, FileRecord, RankRecord
from rlinf_async.backends.checkpoint.tensor_file import ChecksummedFile, header, write_file
from rlinf_async.backends.fsdp.snapshot import HostMemory, Snapshot
from rlinf_async.backends.fsdp.state import Part

ModelFiles = Mapping[str, bytes | Path]
"""file name -> its content, or a file to copy"""


class Content(NamedTuple):
    """What one rank puts into a checkpoint."""

    part: Part
    at_once: Collection[str]
    """tensors of the part that may change before the next optimizer step"""
    own: bytes
    model: ModelFiles
    aliases: dict[str, str]


class Seconds(NamedTuple):
    """How long the last checkpoint took."""

    stalled: float
    """that training stood still for it: until `begin` returned, and in `settle`"""
    writing: float
    """from `begin` until the rank's files were on the disk"""


class CheckpointWriter:
    """Writes the checkpoints of one rank. Its methods are called by one thread."""

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._flight: Future[Path] | None = None
        self._snapshot: Snapshot | None = None
        self._stalled = 0.0
        self._took = 0.0

    @property
    def seconds(self) -> Seconds:
        """Of the last checkpoint; ``writing`` once it is written."""
        return Seconds(self._stalled, self._took)

    def wait(self) -> None:
        """Wait for the checkpoint in flight, if there is one. Raises its error, once."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.result()

    def settle(self) -> None:
        """Wait until what is being copied may change. Call it before changing it."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            began = time.perf_counter()
            snapshot.settle()
            self._stalled += time.perf_counter() - began

    def idle(self, path: Path) -> Future[Path]:
        """Take no part in a checkpoint: on a rank outside the active ones. Gives memory back."""
        self.wait()
        self._memory = HostMemory()
        done: Future[Path] = Future()
        done.set_result(path)
        return done

    def begin(
        self,
        path: Path,
        content: Content,
        rank: int,
        ranks: int,
        optimizer: torch.optim.Optimizer,
    ) -> Future[Path]:
        """Start writing this rank's part; the staging folder is there, nothing is in flight.

        The future ends when this rank's files are on the disk; with the last rank's the folder is
        complete.
        """
        began = time.perf_counter()
        snapshot = Snapshot(content.part, self._memory, content.at_once)
        flight: Future[Path] = Future()
        flight.set_running_or_notify_cancel()  # whoever waits may be cancelled, the thread not
        hook = optimizer.register_step_pre_hook(lambda *_: self.settle())

        def work() -> None:
            try:
                record = _write(staging_folder(path), content, snapshot, rank, ranks)
                rank_done(path, rank, ranks, record)
            except BaseException as error:
                flight.set_exception(error)
            else:
                self._took = time.perf_counter() - began
                flight.set_result(path)
            finally:
                hook.remove()

        try:
            threading.Thread(target=work, name="checkpoint writer").start()
        except BaseException:  # no thread to be had: nobody would ever settle the copy
            hook.remove()
            raise
        self._flight, self._snapshot = flight, snapshot
        self._stalled = time.perf_counter() - began
        return flight


def _write(folder: Path, content: Content, snapshot: Snapshot, rank: int, ranks: int) -> RankRecord:
    """Put this rank's files into the staging folder."""
    part = content.part
    data = snapshot.run()
    with ChecksummedFile(folder, tensor_file(rank, ranks)) as file:
        file.write(header(part.entries, part.shapes))
        file.write(data)
    own = write_file(folder, own_file(rank, ranks), content.own)
    model = _write_model(folder, content.model) if rank == 0 else ()
    sync(folder)
    return RankRecord(tensors=file.record, own=own, model=model, aliases=content.aliases)


def _write_model(folder: Path, files: ModelFiles) -> tuple[FileRecord, ...]:
    if not files:
        return ()
    (folder / MODEL_FOLDER).mkdir()
    records = [
        write_file(
            folder,
            f"{MODEL_FOLDER}/{name}",
            source.read_bytes() if isinstance(source, Path) else source,
        )
        for name, source in files.items()
    ]
    sync(folder / MODEL_FOLDER)
    return tuple(records)
