"""Tensors in a GPU's memory, on their way to another process.

In an item they travel as their elements do: copied to pinned host memory, and found by the reader
in its CPU's memory, to be moved where it wants them. That keeps what a channel promises: the item
can wait, be delivered again, and outlive its maker.

`share_tensor` is for two processes of one host that work on the same memory. What travels is a
`SharedTensor`, which names the memory (CUDA IPC); ``open()`` gives a tensor over it. Where there is
no such memory, or not there, it carries a copy::

    owner of the memory                              user
      SharedTensor = share_tensor(tensor)  ------->  tensor = shared.open(), once
      must not free or write it                      reads and writes the same elements
      may again  <------------- says that it is done, with its tensor gone

Torch keeps the memory while a process that opened it lives and uses it, and for ever if what was
shared is never opened.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from rlinf_async.channels.errors import WireError

if TYPE_CHECKING:
    import torch


class CudaMemory(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Where a tensor lies: the arguments of torch's ``rebuild_cuda_tensor`` that are plain data."""

    host: str
    gpu: str
    """its UUID: its number differs between processes that see other GPUs"""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    handle: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    wait: bool
    """for the event, before the memory is used"""


class SharedTensor(msgspec.Struct, frozen=True):
    """A tensor, as what names its memory, or as a copy. Made by `share_tensor`."""

    memory: CudaMemory | None
    copied: Any = None

    def open(self) -> torch.Tensor:
        """The tensor. Over shared memory, to be called once.

        Raises:
            WireError: this process does not see the GPU that it lies in.
        """
        import torch

        if self.memory is None:
            if not isinstance(self.copied, torch.Tensor):
                raise WireError("a shared tensor came without memory and without a copy")
            return self.copied
        return _open(self.memory)


def share_tensor(tensor: torch.Tensor, *, copy: bool = False) -> SharedTensor:
    """Let a process of this host use this tensor's memory. Gradients do not travel.

    Args:
        copy: send a copy; what is not in a GPU's memory is always copied.
    """
    if copy or tensor.device.type != "cuda" or not tensor.numel():
        return SharedTensor(None, tensor)
    from torch.multiprocessing import reductions

    untyped: Any = reductions
    rebuild, found = untyped.reduce_tensor(tensor.detach())
    if rebuild is not untyped.rebuild_cuda_tensor:
        return SharedTensor(None, tensor)
    (
        _, shape, stride, offset, _, dtype, device, handle, storage_bytes, storage_offset, _,
        counter, counter_offset, event, wait,
    ) = found  # fmt: skip
    memory = CudaMemory(
        host=_host(),
        gpu=_uuid(device),
        shape=tuple(shape),
        stride=tuple(stride),
        offset=offset,
        dtype=str(dtype).removeprefix("torch."),
        handle=handle,
        storage_bytes=storage_bytes,
        storage_offset=storage_offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        wait=wait,
    )
    return SharedTensor(memory)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a GPU's tensor in pinned memory, complete."""
    import torch

    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copied.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return copied


def _open(memory: CudaMemory) -> torch.Tensor:
    import torch
    from torch.multiprocessing import reductions

    untyped: Any = reductions
    dtype = vars(torch).get(memory.dtype)
    if not isinstance(dtype, torch.dtype):
        raise WireError(f"torch has no dtype {memory.dtype!r}")
    seen = [_uuid(index) for index in range(torch.cuda.device_count())]
    if memory.host != _host() or memory.gpu not in seen:
        raise WireError(
            f"this tensor lies in the memory of GPU {memory.gpu} of host {memory.host}, and this "
            f"process of host {_host()} sees {', '.join(seen) or 'no GPU'}: let it see that one, "
            "or send a copy with share_tensor(tensor, copy=True)"
        )
    found: torch.Tensor = untyped.rebuild_cuda_tensor(
        torch.Tensor, memory.shape, memory.stride, memory.offset, torch.storage.TypedStorage,
        dtype, seen.index(memory.gpu), memory.handle, memory.storage_bytes, memory.storage_offset,
        False, memory.counter, memory.counter_offset, memory.event, memory.wait,
    )  # fmt: skip
    return found


def _uuid(index: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


@cache
def _host() -> str:
    """This boot of this machine."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
