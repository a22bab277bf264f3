"""Which slice of which tensor each rank holds, and where: a model under a strategy.

::

model + strategy --split--> slices by stage and tensor rank --shard--> flat ranges --cut--> pieces

A *piece* is a box of a global tensor that lies row-major and without gaps at an offset of one of a
rank's buffers. A layout is a table of pieces and a table of buffers, as numpy columns: a thousand
ranks with a thousand tensors have a million pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from rlinf_async.parallel.boxes import Boxes
from rlinf_async.parallel.columns import Ints
from rlinf_async.parallel.errors import StrategyError, nearest
from rlinf_async.parallel.groups import BufferTable, GroupPieces, held_by_groups
from rlinf_async.parallel.splits import divides
from rlinf_async.parallel.strategy import Strategy
from rlinf_async.parallel.tensors import GlobalTensor, Model


class Piece(NamedTuple):
    """A box of a tensor inside a buffer."""

    tensor: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    """elements of the buffer before it; it lies there row-major, without gaps"""


class Buffer(NamedTuple):
    """A buffer of one rank. Elements in no piece are padding: zeros."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """Tensors spread over ranks. Made by `layout`; several are joined by `together`."""

    tensors: tuple[GlobalTensor, ...]
    ranks: tuple[int, ...]
    """all ranks, including those that hold nothing"""
    buffers: BufferTable
    piece_buffer: Ints
    """``[pieces]``: row of `buffers`"""
    piece_offset: Ints
    """``[pieces]``: elements of the buffer before the piece"""
    boxes: Boxes
    """``[pieces]``: tensor and box of each piece"""

    @property
    def piece_rank(self) -> Ints:
        """``[pieces]``: rank that holds the piece."""
        return self.buffers.rank[self.piece_buffer]

    def of_rank(self, rank: int) -> list[Buffer]:
        """Return the buffers of a rank, in the order of the model."""
        rows = np.flatnonzero(self.buffers.rank == rank)
        pieces: dict[int, list[Piece]] = {int(row): [] for row in rows}
        for index in np.flatnonzero(self.piece_rank == rank):
            pieces[int(self.piece_buffer[index])].append(self._piece(int(index)))
        return [
            Buffer(
                self.buffers.name_of(row),
                self.buffers.shape_of(row),
                self.tensors[int(self.buffers.tensor[row])].dtype,
                tuple(sorted(held, key=lambda piece: piece.offset)),
            )
            for row, held in pieces.items()
        ]

    def _piece(self, index: int) -> Piece:
        tensor = self.tensors[int(self.boxes.tensor[index])]
        dims = len(tensor.shape)
        return Piece(
            tensor.name,
            tuple(self.boxes.start[index, :dims].tolist()),
            tuple(self.boxes.size[index, :dims].tolist()),
            int(self.piece_offset[index]),
        )


def layout(model: Model, strategy: Strategy, ranks: Sequence[int] | None = None) -> Layout:
    """Return the layout of ``model`` under ``strategy``.

    ``ranks`` are the ranks that take part, in the strategy's order; ``0 .. world_size - 1`` by
    default. Raises `StrategyError` naming everything that does not divide, with the nearest values
    that do."""
    placed = tuple(range(strategy.world_size)) if ranks is None else tuple(ranks)
    faults = check(model, strategy)
    faults += _fits_all(model, strategy, faults)
    if len(placed) != strategy.world_size:
        faults.append(f"the strategy takes {strategy.world_size} ranks, {len(placed)} were given")
    if len(set(placed)) != len(placed):
        faults.append("a rank was given twice")
    if faults:
        raise StrategyError(faults)
    tensors = tuple(model.tensors().values())
    found = list(held_by_groups(model, strategy, tensors))
    joined = GroupPieces.joined(found)
    buffers = joined.buffers._replace(rank=np.array(placed, np.int64)[joined.buffers.rank])
    return Layout(tensors, placed, buffers, joined.buffer, joined.offset, joined.boxes)


def check(model: Model, strategy: Strategy) -> list[str]:
    """Return one line for everything about the model that the strategy does not divide."""
    faults = strategy.layer_faults(model.layers)
    names = [parameter.name for parameter in model.parameters]
    if len(set(names)) != len(names):
        faults.append(f"parameter {max(names, key=names.count)!r} is in the model twice")
    if any(parameter.of_experts for parameter in model.parameters):
        ranks = strategy.expert_data_ranks
        replicas = min(strategy.sharding.replicas, ranks)
        faults += divides("sharding.replicas", replicas, "ranks that share an expert", ranks)
    for parameter in model.parameters:
        if parameter.layer is not None and not 0 <= parameter.layer < model.layers:
            faults.append(
                f"layer {parameter.layer} is not one of {model.layers} ({parameter.name})"
            )
        shapes = [tensor.shape for tensor in parameter.tensors]
        tp = strategy.expert_size if parameter.of_experts else strategy.tp
        own = parameter.split.faults(shapes, tp, strategy.ep)
        if parameter.expert is not None:
            own += divides("ep", strategy.ep, "experts", parameter.expert[1])
        faults += [f"{fault} ({parameter.name})" for fault in own]
    return list(_first_of_each_kind(faults))


def _fits_all(model: Model, strategy: Strategy, faults: Sequence[str]) -> list[str]:
    """Where ``tp`` alone is at fault: what fits everything, unless the only fault says so."""
    if not faults or not all(fault.startswith(f"tp={strategy.tp} ") for fault in faults):
        return []
    sizes = (one for one in range(1, 2 * strategy.tp + 1) if _has_tp(model, strategy, one))
    near = nearest(strategy.tp, sizes)
    if not near or (len(faults) == 1 and faults[0].partition(" (")[0].endswith(f": {near}")):
        return []
    return [f"nearest tp that fits all of it: {near}"]


def _has_tp(model: Model, strategy: Strategy, tp: int) -> bool:
    try:
        return not check(model, msgspec.structs.replace(strategy, tp=tp))
    except StrategyError:  # experts cannot be spread over so many ranks
        return False


def _first_of_each_kind(faults: Sequence[str]) -> list[str]:
    """The same misfit is in every layer: keep the first parameter that has it."""
    kinds: dict[str, str] = {}
    for fault in faults:
        kinds.setdefault(fault.partition(" (")[0], fault)
    return list(kinds.values())
