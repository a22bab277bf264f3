"""A plan carried out on numpy arrays of one process: the reference for the executors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from rlinf_async.parallel import BufferView, Layout, Plan

Array: TypeAlias = NDArray[Any]
Buffers: TypeAlias = Mapping[int, Mapping[str, Array]]
"""rank -> name -> the rank's buffer, of the layout's shape"""


def reshard(plan: Plan, old: Buffers) -> dict[int, dict[str, Array]]:
    """Return the buffers of the new layout, filled from those of the old one; padding is zero."""
    new = empty(plan.new, next(iter(_arrays(old)), np.zeros(0)).dtype)
    for rank in plan.new.ranks:
        mine = plan.of_rank(rank)
        for run in (*mine.copies, *mine.receives):
            source = view(old[run.source_rank][run.source.buffer], run.source)
            view(new[rank][run.target.buffer], run.target)[...] = source
    return new


def scatter(layout: Layout, tensors: Mapping[str, Array]) -> dict[int, dict[str, Array]]:
    """Return every rank's buffers, filled from whole tensors."""
    made = empty(layout, next(iter(tensors.values()), np.zeros(0)).dtype)
    for rank, buffer, piece in _pieces(layout):
        window = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
        flat = made[rank][buffer].reshape(-1)
        values = tensors[piece.tensor][window].reshape(-1)
        flat[piece.offset : piece.offset + values.size] = values
    return made


def gather(layout: Layout, buffers: Buffers) -> dict[str, Array]:
    """Return whole tensors out of every rank's buffers."""
    dtype = next(iter(_arrays(buffers)), np.zeros(0)).dtype
    whole = {tensor.name: np.zeros(tensor.shape, dtype) for tensor in layout.tensors}
    for rank, buffer, piece in _pieces(layout):
        window = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
        count = int(np.prod(piece.size, dtype=np.int64))
        flat = buffers[rank][buffer].reshape(-1)[piece.offset : piece.offset + count]
        whole[piece.tensor][window] = flat.reshape(piece.size)
    return whole


def empty(layout: Layout, dtype: Any) -> dict[int, dict[str, Array]]:
    """Return every rank's buffers, all zero."""
    return {
        rank: {one.name: np.zeros(one.shape, dtype) for one in layout.of_rank(rank)}
        for rank in layout.ranks
    }


def view(buffer: Array, where: BufferView) -> Array:
    """Return the elements of a contiguous buffer that a view names, without a copy."""
    flat = buffer.reshape(-1)[where.offset :]
    stride = tuple(step * buffer.itemsize for step in where.stride)
    return as_strided(flat, where.size, stride)


def _arrays(buffers: Buffers) -> list[Array]:
    return [array for held in buffers.values() for array in held.values()]


def _pieces(layout: Layout) -> Any:
    return (
        (rank, buffer.name, piece)
        for rank in layout.ranks
        for buffer in layout.of_rank(rank)
        for piece in buffer.pieces
    )
