"""A plan: moves between two layouts, and what each rank has to do for them.

A rank's part are *runs*: views of buffers that any array library can read and write. A run is a
box on both sides; boxes that lie behind one another without gaps on both sides are one run. The
order of the runs between two ranks is the same on both: by round, then by where the sender has
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rlinf_async.parallel.boxes import Boxes, strides
from rlinf_async.parallel.columns import Flags, Ints
from rlinf_async.parallel.layout import Layout
from rlinf_async.parallel.regions import Pieces
from rlinf_async.parallel.tensors import GlobalTensor


class View(NamedTuple):
    """Elements of a buffer, as in ``torch.as_strided(buffer, size, stride, offset)``."""

    buffer: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """elements, not bytes"""
    offset: int
    """elements of the whole buffer, seen flat, before the first"""


class Run(NamedTuple):
    """A move of one rank. Source and target views have the same size."""

    source_rank: int
    target_rank: int
    source: View
    target: View
    tensors: tuple[str, ...]
    """names of the global tensors in it"""
    elements: int
    bytes: int
    """size in the new layout's dtype"""
    round: int


class RankPlan(NamedTuple):
    """One rank's part of a plan."""

    rank: int
    copies: tuple[Run, ...]
    """runs from its old buffers to its new ones"""
    sends: tuple[Run, ...]
    receives: tuple[Run, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """Moves as columns. Made by `planning.plan`, in an order that the two layouts decide."""

    old: Layout
    new: Layout
    source: Pieces
    target: Pieces
    boxes: Boxes
    """``[moves]``: box that moves; tensors that are flat on both sides have one dimension"""
    source_piece: Ints
    """``[moves]``: row of `source`"""
    target_piece: Ints
    """``[moves]``: row of `target`"""
    round: Ints | None = None
    """``[moves]``: number of its round, after `in_rounds`; None: all at once"""

    @cached_property
    def from_rank(self) -> Ints:
        """``[moves]``: rank that has the box."""
        return self.source.rank[self.source_piece]

    @cached_property
    def to_rank(self) -> Ints:
        """``[moves]``: rank that needs the box."""
        return self.target.rank[self.target_piece]

    @property
    def is_local(self) -> Flags:
        """``[moves]``: copies within one rank."""
        local: Flags = self.from_rank == self.to_rank
        return local

    @cached_property
    def bytes(self) -> Ints:
        """``[moves]``: bytes, in the new layout's dtypes."""
        return self.boxes.volume * item_bytes_of(self.new.tensors)[self.boxes.tensor]

    def sent(self) -> dict[int, int]:
        """Return the bytes that each rank sends to others; ranks that send nothing are left out."""
        return self._by_rank(self.from_rank)

    def received(self) -> dict[int, int]:
        """Return the bytes that each rank gets from others; ranks that get nothing are left out."""
        return self._by_rank(self.to_rank)

    def of_rank(self, rank: int) -> RankPlan:
        """Return what one rank copies, sends and receives, in the order that its peers use too."""
        mine = np.flatnonzero((self.from_rank == rank) | (self.to_rank == rank))
        runs = _runs(self.take(mine))
        return RankPlan(
            rank,
            tuple(run for run in runs if run.source_rank == run.target_rank),
            tuple(run for run in runs if run.source_rank == rank != run.target_rank),
            tuple(run for run in runs if run.target_rank == rank != run.source_rank),
        )

    def take(self, rows: Ints) -> Plan:
        """Return some of the moves."""
        return dataclasses.replace(
            self,
            boxes=self.boxes.take(rows),
            source_piece=self.source_piece[rows],
            target_piece=self.target_piece[rows],
            round=None if self.round is None else self.round[rows],
        )

    def _by_rank(self, ranks: Ints) -> dict[int, int]:
        away = np.flatnonzero(self.from_rank != self.to_rank)
        if not len(away):
            return {}
        total = np.bincount(ranks[away], self.bytes[away])
        return {int(rank): int(total[rank]) for rank in np.flatnonzero(total)}


def item_bytes_of(tensors: Sequence[GlobalTensor]) -> Ints:
    """Return ``[tensors]``: bytes of one element."""
    return np.array([tensor.item_bytes for tensor in tensors], np.int64)


def _runs(moves: Plan) -> list[Run]:
    if len(moves.source_piece) == 0:
        return []
    when = np.zeros(len(moves.source_piece), np.int64) if moves.round is None else moves.round
    at = _offset(moves.source, moves.source_piece, moves.boxes.start)
    buffer = moves.source.buffer[moves.source_piece]
    order = np.lexsort((at, buffer, moves.to_rank, moves.from_rank, when))
    moves, when, at, buffer = moves.take(order), when[order], at[order], buffer[order]
    to = _offset(moves.target, moves.target_piece, moves.boxes.start)
    to_buffer = moves.target.buffer[moves.target_piece]
    elements = moves.boxes.volume
    dense = _dense(moves.source, moves.source_piece, moves.boxes.size)
    dense &= _dense(moves.target, moves.target_piece, moves.boxes.size)
    goes_on = np.zeros(len(at), bool)
    goes_on[1:] = dense[1:] & dense[:-1]
    for column, step in ((when, 0), (buffer, 0), (to_buffer, 0), (at, elements), (to, elements)):
        goes_on[1:] &= column[1:] == (column + step)[:-1]
    heads = np.flatnonzero(~goes_on)
    stops = np.append(heads[1:], len(at))
    source_stride = strides(moves.source.boxes.size[moves.source_piece])
    target_stride = strides(moves.target.boxes.size[moves.target_piece])
    return [
        Run(
            int(moves.from_rank[head]),
            int(moves.to_rank[head]),
            View(_name(moves.old, int(buffer[head])), size, source_view, int(at[head])),
            View(_name(moves.new, int(to_buffer[head])), size, target_view, int(to[head])),
            _tensors(moves, head, stop),
            int(elements[head:stop].sum()),
            int(moves.bytes[head:stop].sum()),
            int(when[head]),
        )
        for head, stop in zip(heads.tolist(), stops.tolist(), strict=True)
        for size, source_view, target_view in [
            _extent(
                int(elements[head:stop].sum()) if dense[head] else 0,
                moves.boxes.size[head],
                source_stride[head],
                target_stride[head],
            )
        ]
    ]


def _offset(pieces: Pieces, piece: Ints, start: Ints) -> Ints:
    """Return where boxes that start at ``start`` lie in their buffers."""
    inside = start - pieces.boxes.start[piece]
    at: Ints = pieces.offset[piece] + (inside * strides(pieces.boxes.size[piece])).sum(axis=1)
    return at


def _dense(pieces: Pieces, piece: Ints, size: Ints) -> Flags:
    """Return whether boxes of this size lie without gaps inside their pieces."""
    partial = size != pieces.boxes.size[piece]
    gaps = np.zeros(len(piece), bool)
    for dim in range(size.shape[1] - 1):
        gaps |= (size[:, dim] > 1) & partial[:, dim + 1 :].any(axis=1)
    return ~gaps


def _extent(
    line: int, size: Ints, source: Ints, target: Ints
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return size and strides of a run: one-dimensional where it has no gaps, else without 1s."""
    if line:
        return (line,), (1,), (1,)
    wide = np.flatnonzero(size > 1)
    return tuple(size[wide].tolist()), tuple(source[wide].tolist()), tuple(target[wide].tolist())


def _name(layout: Layout, row: int) -> str:
    return layout.buffers.name_of(row)


def _tensors(moves: Plan, head: int, stop: int) -> tuple[str, ...]:
    found = dict.fromkeys(moves.boxes.tensor[head:stop].tolist())
    return tuple(moves.new.tensors[index].name for index in found)
