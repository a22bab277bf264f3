"""The weights of a rank's stage: where each tensor of a checkpoint lies in Megatron's parameters.

`parallel.layout` has the slices; Megatron numbers the layers of a stage from 0 on, the layout has
the numbers of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_async.backends.megatron.architecture import VALUE_HEAD, Architecture, layout_of
from rlinf_async.backends.megatron.grid import Grid
from rlinf_async.parallel import ModelMismatch, Piece
from rlinf_async.parallel.boxes import cut_ranges

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


class Held(NamedTuple):
    """A parameter of this rank, and the boxes of the checkpoint's tensors in it."""

    name: str
    """in the whole model"""
    parameter: nn.Parameter
    pieces: tuple[Piece, ...]


def held_weights(chunks: Sequence[nn.Module], architecture: Architecture, grid: Grid) -> list[Held]:
    """Return the parameters of this rank in the order of the layout.

    Raises:
        ModelMismatch: model and layout have different parameters: a defect of the name map.
    """
    assert grid.place is not None
    strategy = grid.strategy
    per_chunk = architecture.decoder.layers // (strategy.pp * strategy.virtual_stages)
    live = {
        _global_name(name, per_chunk * (number * strategy.pp + grid.place.stage)): one
        for number, chunk in enumerate(chunks)
        for name, one in chunk.named_parameters()
    }
    place = grid.place
    rank = place.tp + strategy.tp * (place.dp + strategy.dp * place.stage)
    buffers = {one.name: one for one in layout_of(architecture, strategy).of_rank(rank)}
    differing = sorted(
        name
        for name in live.keys() | buffers.keys()
        if name not in live
        or name not in buffers
        or tuple(live[name].shape) != tuple(buffers[name].shape)
    )
    if differing:
        raise ModelMismatch(
            f"Megatron's model and the name map differ in {len(differing)} parameters, the first: "
            f"{', '.join(differing[:4])}"
        )
    return [Held(name, live[name], one.pieces) for name, one in buffers.items()]


def load_weights(held: list[Held], tensor: Callable[[str], Tensor]) -> None:
    """Fill the parameters; ``tensor`` returns a whole tensor of the checkpoint by its name.

    Rows that were added to make the vocabulary divide become 0.
    """
    zero_padding(held)
    with torch.no_grad():
        for one in held:
            flat = one.parameter.view(-1)
            for piece in one.pieces:
                whole = tensor(piece.tensor)
                part = whole[_box(piece)].to(flat.dtype).reshape(-1)
                flat[piece.offset : piece.offset + part.numel()].copy_(part)


def zero_padding(held: list[Held]) -> None:
    """Zero the parameters that have more rows than the checkpoint."""
    with torch.no_grad():
        for one in held:
            if sum(_elements(piece) for piece in one.pieces) < one.parameter.numel():
                one.parameter.zero_()


def first_weights(whole: nn.Module) -> Callable[[str], Tensor]:
    """Return the weights of a model of transformers by name; those of a value head are 0."""
    state, hidden = whole.state_dict(), cast(Any, whole).config.hidden_size
    head = {"weight": torch.zeros(1, hidden), "bias": torch.zeros(1)}

    def tensor(name: str) -> Tensor:
        if name.startswith(VALUE_HEAD):
            return head[name.removeprefix(VALUE_HEAD)]
        found: Tensor = state[name]
        return found

    return tensor


def own_slices(held: list[Held]) -> Iterator[tuple[Piece, Tensor]]:
    """Yield each slice that this rank has, with its box in the tensor of the checkpoint."""
    for one in held:
        flat = one.parameter.detach().view(-1)
        for piece in one.pieces:
            yield piece, flat[piece.offset : piece.offset + _elements(piece)].view(piece.size)


def pieces_of_range(held: Held, start: int, count: int) -> Iterator[Piece]:
    """Yield the boxes of ``count`` elements of a flat parameter, from element ``start`` on; their
    offsets count from there."""
    for piece in held.pieces:
        size = np.array([piece.size], np.int64)
        bounds = np.array([start, start + count]) - piece.offset
        low, high = bounds.clip(0, size.prod())
        _, at, starts, sizes = cut_ranges(size, np.array([low]), np.array([high]))
        for first, inside, shape in zip(at.tolist(), starts, sizes.tolist(), strict=True):
            where = tuple((inside + piece.start).tolist())
            yield Piece(piece.tensor, where, tuple(shape), piece.offset + first - start)


def _global_name(name: str, first_layer: int) -> str:
    found = LAYER.match(name)
    if found is None:
        return name
    return f"decoder.layers.{int(found[1]) + first_layer}.{name[found.end() :]}"


def _box(piece: Piece) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + size) for start, size in zip(piece.start, piece.size, strict=True)
    )


def _elements(piece: Piece) -> int:
    return torch.Size(piece.size).numel()
