"""`CheckpointWriter`: one checkpoint at a time, written by a thread beside the training.

::

                       waits for                              unblocked by
    begin              the checkpoint before                  its thread
    optimizer step     the copy into host memory (`settle`)   the thread, which then only writes
    thread             the disk
    end of process     the thread, which is no daemon

    thread: copy -> tensors' file -> own file -> [rank 0: model's files] -> record of the rank
            -> the rank whose record is the last: metadata, rename

An error of the thread is set in the checkpoint's future; it is raised where that is awaited, and by
the next `wait` at the latest. The folder does not exist then, and the one before it still does.
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
from rlinf_async.backends.checkpoint.part import Part
from rlinf_async.backends.checkpoint.snapshot import HostMemory, Snapshot
from rlinf_async.backends.checkpoint.tensor_file import ChecksummedFile, header, write_file

ModelFiles = Mapping[str, bytes | Path]
"""file name -> its content, or a file to copy"""


class Content(NamedTuple):
    """What one rank writes into a checkpoint."""

    part: Part
    at_once: Collection[str]
    """names of tensors that may change before the next optimizer step"""
    own: bytes
    model: ModelFiles
    aliases: dict[str, str]


class Seconds(NamedTuple):
    """Durations of the last checkpoint."""

    stalled: float
    """in which training stopped for it: until `begin` returned, and in `settle`"""
    writing: float
    """from `begin` until the rank's files were on the disk"""


class CheckpointWriter:
    """Writes the checkpoints of one rank. Its methods are called by one thread."""

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._pending: Future[Path] | None = None
        self._snapshot: Snapshot | None = None
        self._stalled = 0.0
        self._took = 0.0

    @property
    def seconds(self) -> Seconds:
        """Durations of the last checkpoint; ``writing`` is known once it is written."""
        return Seconds(self._stalled, self._took)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if any. Raises its error, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def settle(self) -> None:
        """Wait until parameters and moments are copied. Call it before changing them."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            began = time.perf_counter()
            snapshot.settle()
            self._stalled += time.perf_counter() - began

    def idle(self, path: Path) -> Future[Path]:
        """Return the result of an idle rank, which writes nothing, and free its memory."""
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
        """Start writing this rank's part. The staging folder exists, no other is being written.

        The future ends when this rank's files are on the disk; with the last rank's the folder is
        complete.
        """
        began = time.perf_counter()
        snapshot = Snapshot(content.part, self._memory, content.at_once)
        written: Future[Path] = Future()
        written.set_running_or_notify_cancel()  # a wait may be cancelled, the thread not
        hook = optimizer.register_step_pre_hook(lambda *_: self.settle())

        def work() -> None:
            try:
                record = _write(staging_folder(path), content, snapshot, rank, ranks)
                rank_done(path, rank, ranks, record)
            except BaseException as error:
                written.set_exception(error)
            else:
                self._took = time.perf_counter() - began
                written.set_result(path)
            finally:
                hook.remove()

        try:
            threading.Thread(target=work, name="checkpoint writer").start()
        except BaseException:  # no thread could be started, so the copy would never be made
            hook.remove()
            raise
        self._pending, self._snapshot = written, snapshot
        self._stalled = time.perf_counter() - began
        return written


def _write(folder: Path, content: Content, snapshot: Snapshot, rank: int, ranks: int) -> RankRecord:
    """Write this rank's files into the staging folder."""
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
