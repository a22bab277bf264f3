"""`CheckpointWriter`: one checkpoint at a time, written by a thread beside the training.

::

                       waits for                              unblocked by
    begin              the checkpoint before                  its thread
    optimizer step     the copy into host memory (`settle`)   the thread, which then only writes
    thread             the disk
    end of process     the thread, which is no daemon

    begin:  small tensors and buffers are copied, the rest is referred to
    thread: copy of the rest -> tensors' file -> own file -> [rank 0: model's files]
            -> record of the rank -> the rank whose record is the last: metadata, rename

Parameters and moments change in optimizer steps alone, so their copy runs beside the forward and
backward passes of the next one. Whatever else changes them has to wait too
(`CheckpointWriter.settle`). Code that does not is detected only in some cases: torch's version
counters, which are compared, count operations on the tensor that was copied, but neither changes of
FSDP2's shards through their parameter, nor fused kernels (AdamW's). A detected change fails the
checkpoint.

An error of the thread is set in the checkpoint's future; it is raised where that is awaited, and by
the next `wait` at the latest. The folder does not exist then, and the one before it still does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlinf_async.backends.checkpoint.folders import (
    MODEL_FOLDER,
    CheckpointError,
    FileRecord,
    RankRecord,
    own_file,
    rank_done,
    staging_folder,
    sync,
    tensor_file,
)
from rlinf_async.backends.checkpoint.tensor_file import (
    ChecksummedFile,
    RankPart,
    header,
    write_file,
)

SMALL_BYTES = 64 * 1024
"""size up to which a tensor is copied at once"""


class HostMemory:
    """Memory for one rank's tensors, in the order of its file; pinned where they are on a CUDA
    device. It is kept for the next copy: fresh pages cost more than the copy itself."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def views(self, part: RankPart) -> dict[str, Tensor]:
        """Return memory for every tensor of the part, one behind the other."""
        needed = sum(one.nbytes for one in part.entries)
        pinned = any(tensor.is_cuda for tensor in part.live.values())
        if len(self._bytes) < needed or (pinned and not self._bytes.is_pinned()):
            self._bytes = torch.empty(needed, dtype=torch.uint8, pin_memory=pinned)
        found: dict[str, Tensor] = {}
        at = 0
        for one in part.entries:
            found[one.name] = self._bytes[at : at + one.nbytes].view(one.dtype).view(one.shape)
            at += one.nbytes
        return found

    def content(self, part: RankPart) -> memoryview:
        """Return the bytes of the part."""
        needed = sum(one.nbytes for one in part.entries)
        content: memoryview = self._bytes[:needed].numpy().data
        return content


class Snapshot:
    """The copying of one part. ``at_once``: names that may change before the next step."""

    def __init__(self, part: RankPart, memory: HostMemory, at_once: Collection[str]) -> None:
        self.part = part
        self._memory = memory
        self._settled = threading.Event()
        copies = memory.views(part)
        self._later: list[tuple[str, Tensor, Tensor, int]] = []
        for name, target in copies.items():
            live = part.live[name]
            if name in at_once or live.nbytes <= SMALL_BYTES:
                target.copy_(live)
            else:
                self._later.append((name, live, target, live._version))
        devices = {live.device for _, live, _, _ in self._later if live.is_cuda}
        self._ready = {device: _event(device) for device in devices}

    def run(self) -> memoryview:
        """Copy the other tensors; return the bytes of the file. For the writer's thread.

        Raises `CheckpointError` when a tensor was changed meanwhile, as far as that is detected.
        """
        try:
            self._copy()
        finally:
            self._later.clear()
            self.part.live.clear()
            self._settled.set()
        return self._memory.content(self.part)

    def _copy(self) -> None:
        new_stream: Any = torch.cuda.Stream  # beside those of the training
        streams = {device: new_stream(device) for device in self._ready}
        for device, stream in streams.items():
            stream.wait_event(self._ready[device])
        for _, live, target, _ in self._later:
            if live.is_cuda:
                with torch.cuda.stream(streams[live.device]):
                    target.copy_(live, non_blocking=True)
            else:
                target.copy_(live)
        for stream in streams.values():
            stream.synchronize()
        changed = [name for name, live, _, version in self._later if live._version != version]
        if changed:
            raise CheckpointError(
                f"{changed[0]!r} (and {len(changed) - 1} more) changed while the checkpoint copied "
                "it: call settle_checkpoint() before changing parameters or moments other than by "
                "the optimizer's step"
            )

    def settle(self) -> None:
        """Wait until parameters and moments may change."""
        self._settled.wait()


def _event(device: torch.device) -> torch.cuda.Event:
    """Record the work that the device was given so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


ModelFiles = Mapping[str, bytes | Path]
"""file name -> its content, or a file to copy"""


class Content(NamedTuple):
    """The part of a checkpoint that one rank writes."""

    part: RankPart
    at_once: Collection[str]
    """names of tensors that may change before the next optimizer step"""
    own: bytes
    model: ModelFiles
    aliases: dict[str, str]


class Seconds(NamedTuple):
    """Durations of the last checkpoint."""

    stalled: float
    """seconds for which training stopped for the checkpoint: until `begin` returned, and in
    `settle`"""
    writing: float
    """seconds from `begin` until the rank's files were on the disk"""


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
