"""Which slice of which tensor each rank holds, and where: a model under a strategy.

::

model + strategy --split--> slices by stage and tensor rank --shard--> flat ranges --cut--> pieces

A *piece* is a box of a global tensor that lies row-major and without gaps at an offset of one of a
rank's buffers. A layout is a table of pieces and a table of buffers, as numpy columns: a thousand
ranks with a thousand tensors have a million pieces.

A *group* are the ranks that share the same slices before sharding: one (stage, tensor rank), or for
experts one (stage, expert tensor rank, expert rank). Its parameters are cut once; its shards are
worked out once, and repeated for its replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np

from rlinf_async.parallel.regions import Boxes, Ints, cut_ranges, spread
from rlinf_async.parallel.sharding import GroupBuffer, Replicated, ShardedParameter, Shards
from rlinf_async.parallel.splits import Cut, Shape, Split, StrategyError, divides, nearest
from rlinf_async.parallel.strategy import GlobalTensor, Model, Parameter, Strategy


class BufferTable(NamedTuple):
    """Buffers as columns, ``[buffers]`` each; names and inner shapes are shared."""

    rank: Ints
    kind: Ints
    """row of ``kinds``"""
    tensor: Ints
    """a tensor that is in it, for its dtype"""
    rows: Ints
    """extent of the first dimension"""
    kinds: tuple[tuple[str, Shape | None], ...]
    """``(name, the other dimensions)``; None for a scalar"""

    def name_of(self, row: int) -> str:
        """Return the name of a buffer."""
        return self.kinds[int(self.kind[row])][0]

    def shape_of(self, row: int) -> Shape:
        """Return the shape of a buffer."""
        inner = self.kinds[int(self.kind[row])][1]
        return () if inner is None else (int(self.rows[row]), *inner)


class GroupPieces(NamedTuple):
    """Pieces of some ranks."""

    buffers: BufferTable
    buffer: Ints
    """``[pieces]``: row of ``buffers``"""
    offset: Ints
    """``[pieces]``"""
    boxes: Boxes

    @classmethod
    def joined(cls, parts: Sequence[GroupPieces]) -> GroupPieces:
        """Return the pieces of all parts; buffers are renumbered."""
        kinds: dict[tuple[str, Shape | None], int] = {}
        columns: list[list[Ints]] = [[] for _ in range(9)]
        dims = max((part.boxes.start.shape[1] for part in parts), default=1)
        first = 0
        for part in parts:
            table = part.buffers
            kind = np.array([kinds.setdefault(one, len(kinds)) for one in table.kinds], np.int64)
            rows = (table.rank, kind[table.kind], table.tensor, table.rows)
            start, size = widened(part.boxes.start, dims, 0), widened(part.boxes.size, dims, 1)
            pieces = (part.buffer + first, part.offset, part.boxes.tensor, start, size)
            for column, values in zip(columns, (*rows, *pieces), strict=True):
                column.append(values)
            first += len(table.rank)
        every = [
            _concatenated(column, dims if place > 6 else 0) for place, column in enumerate(columns)
        ]
        buffers = BufferTable(every[0], every[1], every[2], every[3], tuple(kinds))
        return cls(buffers, every[4], every[5], Boxes(*every[6:]))


def widened(table: Ints, dims: int, fill: int) -> Ints:
    """Return a table of coordinates ``[n, d]`` as ``[n, dims]``."""
    missing = dims - table.shape[1]
    return np.pad(table, ((0, 0), (0, missing)), constant_values=fill) if missing else table


def held_by_groups(
    model: Model, strategy: Strategy, tensors: Sequence[GlobalTensor]
) -> Iterator[GroupPieces]:
    """Yield the pieces of each group; `BufferTable.rank` counts as the strategy does."""
    index = {tensor.name: number for number, tensor in enumerate(tensors)}
    dims = max([1, *(len(tensor.shape) for tensor in tensors)])
    stages = _stages(model, strategy)
    alone = _shared_by_stages(model, strategy)
    for stage in range(strategy.pp):
        dense = [one for one in stages[stage] if not one.of_experts]
        for tp_rank in range(strategy.tp):
            cuts = [_cut(one, strategy.tp, tp_rank, 1, 0) for one in dense]
            ranks = strategy.dense_ranks(stage, tp_rank)
            yield _group(dense, cuts, ranks, strategy, alone, index, dims, "")
        experts = [one for one in stages[stage] if one.of_experts]
        if not experts:
            continue
        for ep_rank in range(strategy.ep):
            mine = [one for one in experts if _is_on(one, strategy.ep, ep_rank)]
            for tp_rank in range(strategy.expert_size):
                cuts = [
                    _cut(one, strategy.expert_size, tp_rank, strategy.ep, ep_rank) for one in mine
                ]
                ranks = strategy.expert_ranks(stage, tp_rank, ep_rank)
                yield _group(mine, cuts, ranks, strategy, alone, index, dims, "experts")


def _stages(model: Model, strategy: Strategy) -> list[list[Parameter]]:
    of_layer = strategy.stage_of_layers(model.layers)
    stages: list[list[Parameter]] = [[] for _ in range(strategy.pp)]
    for parameter in model.parameters:
        if parameter.layer is not None:
            where = [of_layer[parameter.layer]]
        else:
            where = {"first": [0], "last": [strategy.pp - 1]}.get(
                parameter.stage, list(range(strategy.pp))
            )
        for stage in where:
            stages[stage].append(parameter)
    return [_untied(held) for held in stages]


def _untied(held: list[Parameter]) -> list[Parameter]:
    names = {one.name for one in held}
    return [one for one in held if one.tied_to not in names]


def _shared_by_stages(model: Model, strategy: Strategy) -> frozenset[str]:
    """Return the names of tied parameters, over the whole model, of which stages have a copy each:
    a stage has only one of them."""
    if strategy.pp == 1:
        return frozenset()
    tied = [(one.name, one.tied_to) for one in model.parameters if one.tied_to is not None]
    return frozenset(name for pair in tied for name in pair)


def _is_on(parameter: Parameter, ep: int, ep_rank: int) -> bool:
    if parameter.expert is None:
        return True
    number, experts = parameter.expert
    return number // (experts // ep) == ep_rank


def _cut(parameter: Parameter, tp: int, rank: int, ep: int, ep_rank: int) -> Cut:
    shapes = tuple(tensor.shape for tensor in parameter.tensors)
    return _cut_shapes(parameter.split, shapes, tp, rank, ep, ep_rank)


@cache
def _cut_shapes(
    split: Split, shapes: tuple[Shape, ...], tp: int, rank: int, ep: int, ep_rank: int
) -> Cut:
    return split.cut(shapes, tp, rank, ep, ep_rank)


def _group(
    parameters: Sequence[Parameter],
    cuts: Sequence[Cut],
    ranks: range,
    strategy: Strategy,
    alone: frozenset[str],
    index: dict[str, int],
    dims: int,
    label: str,
) -> GroupPieces:
    held = [
        ShardedParameter(
            one.name,
            cut.shape,
            one.tensors[0].dtype,
            one.tensors[0].item_bytes,
            one.sharded,
            one.name in alone,
        )
        for one, cut in zip(parameters, cuts, strict=True)
    ]
    sharding = strategy.sharding
    whole = isinstance(sharding, Replicated)
    replicas = len(ranks) if whole else min(sharding.replicas, len(ranks))
    buffers, shards = sharding.shards(held, len(ranks) // replicas, label)
    own = [index[one.tensors[0].name] for one in parameters]
    pieces = _pieces(parameters, cuts, shards, index, dims)
    return _on_ranks(pieces, buffers, own, np.array(ranks, np.int64), replicas)


class _ShardPieces(NamedTuple):
    shard: Ints
    buffer: Ints
    offset: Ints
    boxes: Boxes


def _pieces(
    parameters: Sequence[Parameter],
    cuts: Sequence[Cut],
    shards: Shards,
    index: dict[str, int],
    dims: int,
) -> _ShardPieces:
    """Cut the shards' ranges into boxes of global tensors."""
    every = [
        (parameter, piece)
        for parameter, cut in zip(parameters, cuts, strict=True)
        for piece in cut.pieces
    ]
    tensor = np.array([index[one.tensors[piece.part].name] for one, piece in every], np.int64)
    start = _table([piece.start for _, piece in every], dims, 0)
    size = _table([piece.size for _, piece in every], dims, 1)
    lies_at = np.array([piece.offset for _, piece in every], np.int64)
    length = np.array([math.prod(piece.size) for _, piece in every], np.int64)
    count = np.array([len(cut.pieces) for cut in cuts], np.int64)
    first = np.cumsum(count) - count
    row, number = spread(count[shards.parameter])
    piece = first[shards.parameter[row]] + number
    low = np.maximum(shards.start[row], lies_at[piece])
    high = np.minimum(shards.stop[row], lies_at[piece] + length[piece])
    offset = shards.offset[row] + low - shards.start[row]
    part, at, box_start, box_size = cut_ranges(
        size[piece], low - lies_at[piece], high - lies_at[piece]
    )
    row, offset, low = row[part], offset[part], (low - lies_at[piece])[part]
    return _ShardPieces(
        shards.shard[row],
        shards.buffer[row],
        offset + at - low,
        Boxes(tensor[piece[part]], start[piece[part]] + box_start, box_size),
    )


def _on_ranks(
    pieces: _ShardPieces,
    buffers: Sequence[GroupBuffer],
    own: Sequence[int],
    ranks: Ints,
    replicas: int,
) -> GroupPieces:
    """Give the shards, and their replicas, to the ranks."""
    shards = len(ranks) // replicas
    kinds = {
        (one.name, None if one.scalar else one.inner): number for number, one in enumerate(buffers)
    }
    kind = np.arange(len(buffers))
    tensor = np.array([own[one.parameter] for one in buffers], np.int64)
    rows = np.array([one.rows for one in buffers], np.int64).reshape(len(buffers), shards).T
    table = BufferTable(
        np.repeat(ranks, len(buffers)),
        np.tile(kind, len(ranks)),
        np.tile(tensor, len(ranks)),
        np.tile(rows.ravel(), replicas),
        tuple(kinds),
    )
    copy = np.repeat(np.arange(replicas), len(pieces.shard))
    each = np.tile(np.arange(len(pieces.shard)), replicas)
    rank = copy * shards + pieces.shard[each]
    return GroupPieces(
        table,
        rank * len(buffers) + pieces.buffer[each],
        pieces.offset[each],
        pieces.boxes.take(each),
    )


def _table(rows: Sequence[Shape], dims: int, fill: int) -> Ints:
    padded = [row + (fill,) * (dims - len(row)) for row in rows]
    return np.array(padded, np.int64).reshape(len(rows), dims)


def _concatenated(column: Sequence[Ints], dims: int) -> Ints:
    empty = np.zeros((0, dims) if dims else 0, np.int64)
    return np.concatenate([empty, *column])


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
    """Keep the first fault of each kind: the same misfit is in every layer."""
    kinds: dict[str, str] = {}
    for fault in faults:
        kinds.setdefault(fault.partition(" (")[0], fault)
    return list(kinds.values())
