"""Where a model and its optimizer are: on the accelerator or the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf_async.backends.fsdp.errors import FSDPError


def rank_device(name: str, world_size: int, rank: int) -> str:
    """Return the device of one of several ranks: of ``"cuda"`` each takes the one of its number."""
    return f"cuda:{rank}" if name == "cuda" and world_size > 1 else name


def existing_device(name: str) -> torch.device:
    """Return the device called ``name``; raises `ValueError` when it is not there."""
    device = torch.device(name)
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise ValueError(
            f"device is {name!r}, but torch sees {found} CUDA devices; set device to 'cpu', or "
            "look at CUDA_VISIBLE_DEVICES and at which torch is installed"
        )
    return device


def check_strategy(strategy: str, world_size: int, device: torch.device) -> None:
    """Raise `FSDPError` where parameters cannot be moved: FSDP1 owns the storage of its own."""
    if strategy == "fsdp1" and world_size > 1 and device.type != "cpu":
        raise FSDPError(
            f"strategy 'fsdp1' cannot offload from {device}: use strategy 'fsdp2' to offload"
        )


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move parameters, their gradients and buffers; what is there already stays untouched."""
    if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
        model.to(device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move all moments (and step counters of accelerators) that are elsewhere."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device != device:
                state[key] = value.to(device)
