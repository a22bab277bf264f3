"""A copy of this rank's part in host memory, made while training goes on.

::

    begin      small tensors and buffers are copied, the rest is referred to
    run        in the writer's thread: parameters and moments are copied
    settled    from here on they may change: the next optimizer step waits for that

Parameters and moments change in optimizer steps alone, so the copy runs beside the forward and
backward passes of the next one. Whatever else changes them has to wait too
(`CheckpointWriter.settle`). Code that does not is detected only in some cases: torch's version
counters, which are compared, count operations on the tensor that was copied, but neither changes of
FSDP2's shards through their parameter, nor fused kernels (AdamW's). A detected change fails the
checkpoint.

The memory is kept for the next copy: fresh pages cost more than the copy itself. It is pinned where
there is a CUDA device.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

import torch
from torch import Tensor

from rlinf_async.backends.checkpoint.errors import CheckpointError
from rlinf_async.backends.checkpoint.part import Part

SMALL_BYTES = 64 * 1024
"""size up to which a tensor is copied at once"""


class HostMemory:
    """Memory for one rank's tensors, in the order of its file."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def views(self, part: Part) -> dict[str, Tensor]:
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

    def content(self, part: Part) -> memoryview:
        """Return the bytes of the part."""
        needed = sum(one.nbytes for one in part.entries)
        content: memoryview = self._bytes[:needed].numpy().data
        return content


class Snapshot:
    """The copying of one part. ``at_once``: names that may change before the next step."""

    def __init__(self, part: Part, memory: HostMemory, at_once: Collection[str]) -> None:
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
        streams = {device: _stream(device) for device in self._ready}
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


def _stream(device: torch.device) -> torch.cuda.Stream:
    """Make a stream beside that of the training."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
