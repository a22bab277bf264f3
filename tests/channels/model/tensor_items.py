"""Items with a torch tensor: a module of its own, since torch takes seconds to import."""

from __future__ import annotations

import msgspec
import torch


class TensorSample(msgspec.Struct):
    """A struct with a tensor, each element of which says the number."""

    number: int
    version: int
    data: torch.Tensor


def make(number: int, version: int, size: int) -> TensorSample:
    """An item of this number and size."""
    return TensorSample(number, version, torch.full((size,), number % 251, dtype=torch.uint8))
