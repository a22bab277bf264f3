"""What this rank has to write of a sharded model, and how it takes its part out of a checkpoint.

A rank's part of a sharded tensor is a range of rows, dealt as by ``torch.chunk``. What is the same
on all ranks is written by rank 0 alone. The folder: see `rlinf_async.backends.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from rlinf_async.backends.checkpoint.reading import SavedTensor
from rlinf_async.backends.checkpoint.tensor_file import Box, Entry, in_file_order
from rlinf_async.backends.fsdp.errors import CheckpointError
from rlinf_async.backends.fsdp.sharding import local_shard


class Part(NamedTuple):
    """A rank's part of the state: which tensors, of which global ones, and where they are."""

    entries: list[Entry]
    """in the order of the file"""
    shapes: dict[str, tuple[int, ...]]
    """of the global tensors"""
    live: dict[str, Tensor]
    """the tensors themselves, which go on changing"""


def part_of_rank(state: Mapping[str, Tensor], rank: int) -> Part:
    """Return what this rank has to write of ``state``: its shards, and on rank 0 whole tensors."""
    entries: list[Entry] = []
    shapes: dict[str, tuple[int, ...]] = {}
    live: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if rank and not isinstance(tensor, DTensor):
            continue
        local = local_shard(tensor).detach()
        size = tuple(local.shape)
        entries.append(Entry(name, local.dtype, size, (Box(name, first(tensor), size, 0),)))
        shapes[name], live[name] = tuple(tensor.shape), local
    return Part(in_file_order(entries), shapes, live)


def first(tensor: Tensor) -> tuple[int, ...]:
    """Return where this rank's part of a tensor begins."""
    rows = (first_row(tensor),) if isinstance(tensor, DTensor) else (0,)
    return (rows + (0,) * tensor.ndim)[: tensor.ndim]


def first_row(tensor: DTensor) -> int:
    """Return the first global row of this rank's shard (rows are dealt as by ``torch.chunk``)."""
    mesh = tensor.device_mesh
    chunk = -(-tensor.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * chunk, tensor.shape[0])


def check_fits(target: Tensor, saved: SavedTensor, name: str) -> None:
    """Raise `CheckpointError` unless the saved tensor has the target's shape and dtype."""
    if saved.shape != tuple(target.shape):
        raise CheckpointError(
            f"{name!r} is {list(saved.shape)} in the checkpoint, {list(target.shape)} in the model"
        )
    if saved.dtype != target.dtype:
        raise CheckpointError(
            f"{name!r} is {saved.dtype} in the checkpoint, {target.dtype} in the model"
        )


def fill(target: Tensor, saved: SavedTensor) -> None:
    """Copy the part that this rank holds of ``target`` out of a checkpoint, in place."""
    saved.fill(local_shard(target).detach(), first(target))
