"""Moving a model and its optimizer between the accelerator and the CPU.

Through pinned memory, which is copied thirty times as fast as other memory (55 against 1.8 GB/s on
an H200). Pinning takes far longer than the copy; torch keeps what was pinned for the next one, and
rounds each tensor up to a power of two. Shards (`DTensor`) are copied to other memory.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlinf_async.backends.fsdp.errors import FSDPError

log = logging.getLogger(__name__)


def rank_device(name: str, world_size: int, rank: int) -> str:
    """Return the device of a rank: several ranks on ``"cuda"`` have one each, by number."""
    return f"cuda:{rank}" if name == "cuda" and world_size > 1 else name


def existing_device(name: str) -> torch.device:
    """Return the device called ``name``; raises `ValueError` when it does not exist."""
    device = torch.device(name)
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise ValueError(
            f"device is {name!r}, but torch sees {found} CUDA devices; set device to 'cpu', or "
            "check CUDA_VISIBLE_DEVICES and whether the installed torch has CUDA"
        )
    return device


def check_strategy(strategy: str, world_size: int, device: torch.device) -> None:
    """Raise `FSDPError` where parameters cannot be moved: FSDP1 manages their storage itself."""
    if strategy == "fsdp1" and world_size > 1 and device.type != "cpu":
        raise FSDPError(
            f"strategy 'fsdp1' cannot offload from {device}: use strategy 'fsdp2' to offload"
        )


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move parameters, their gradients and buffers; does nothing where all are there already."""
    tensors = (*model.parameters(), *model.buffers())
    left = {tensor.device for tensor in tensors if tensor.device != device}
    if left:
        model._apply(lambda tensor: moved(tensor, device))  # type: ignore[no-untyped-call]
        finish_copies(*left, device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's state (moments, step counters) to a device."""
    left = set[torch.device]()
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device != device:
                left.add(value.device)
                state[key] = moved(value, device)
    if left:
        finish_copies(*left, device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on another device. It may still be copied: see `finish_copies`."""
    if device.type != "cpu" or not tensor.is_cuda or isinstance(tensor, DTensor):
        return tensor.to(device, non_blocking=device.type != "cpu")
    return pinned_like(tensor).copy_(tensor, non_blocking=True)


def pinned_like(tensor: Tensor) -> Tensor:
    """Return a tensor of this shape and type in pinned memory, or, where none can be had, in other
    memory."""
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError as error:  # such as a limit of the host on it
        log.warning("memory cannot be pinned, so copies take longer: %s", error)
        return torch.empty_like(tensor, device="cpu")


def finish_copies(*devices: torch.device) -> None:
    """Return when what was copied from and to these devices has arrived."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
