"""What one rank writes into a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rlinf_async.backends.checkpoint.tensor_file import Entry


class Part(NamedTuple):
    """A rank's part of the state."""

    entries: list[Entry]
    """in the order of the file"""
    shapes: dict[str, tuple[int, ...]]
    """of the global tensors"""
    live: dict[str, Tensor]
    """the tensors themselves, which training changes"""
