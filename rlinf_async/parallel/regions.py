"""Regions and their holders: pieces of the same box as one, and source regions made disjoint.

Tensors that both layouts hold in flat ranges (all FSDP and distributed-optimizer shards,
column-parallel slices) are treated as one-dimensional: ranges then need not be cut into boxes, and
neighbours are one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlinf_async.parallel.boxes import Boxes, overlaps, strides
from rlinf_async.parallel.columns import Flags, Ints, any_of, distinct, ordered_by, rows_of, spread


class Pieces(NamedTuple):
    """A layout's pieces, as columns; rows in any order."""

    rank: Ints
    buffer: Ints
    offset: Ints
    boxes: Boxes

    def take(self, rows: Ints) -> Pieces:
        """Return some of the rows."""
        return Pieces(self.rank[rows], self.buffer[rows], self.offset[rows], self.boxes.take(rows))


class Regions(NamedTuple):
    """Distinct boxes, and for each the pieces it lies in: ``holders[first[i] : first[i + 1]]``."""

    boxes: Boxes
    first: Ints
    """``[regions + 1]``"""
    holders: Ints
    """rows of the pieces, ordered by rank within a region"""

    @property
    def copies(self) -> Ints:
        """``[regions]``: how many pieces hold each."""
        return np.diff(self.first)

    def take(self, rows: Ints) -> Regions:
        """Return some of the regions."""
        owner, number = spread(self.copies[rows])
        first = np.concatenate([[0], np.cumsum(self.copies[rows])])
        return Regions(self.boxes.take(rows), first, self.holders[self.first[rows[owner]] + number])

    def at(self, region: Ints, rank: Ints, piece_rank: Ints) -> Ints:
        """Return the piece in which ``rank`` holds ``region``, -1 where it does not; one of each a
        row."""
        width = int(piece_rank.max(initial=0)) + 1
        owner, _ = spread(self.copies)
        held = owner * width + piece_rank[self.holders]
        asked = region * width + rank
        place = np.minimum(np.searchsorted(held, asked), len(held) - 1)
        found: Ints = np.where((rank < width) & (held[place] == asked), self.holders[place], -1)
        return found

    def one_per_rank(self, piece_rank: Ints) -> Regions:
        """Forget further copies of a region on one rank (tied parameters)."""
        if len(self.holders) == len(self.boxes.tensor):
            return self
        owner, _ = spread(self.copies)
        rank = piece_rank[self.holders]
        again = np.zeros(len(owner), bool)
        again[1:] = (owner[1:] == owner[:-1]) & (rank[1:] == rank[:-1])
        if not again.any():
            return self
        count = np.bincount(owner[~again], minlength=len(self.first) - 1)
        return Regions(self.boxes, np.concatenate([[0], np.cumsum(count)]), self.holders[~again])


def flat_tensors(boxes: Boxes, shapes: Ints) -> Ints:
    """Return for each tensor whether all its boxes are ranges of its row-major order;
    ``[tensors]`` bool."""
    partial = boxes.size != shapes[boxes.tensor]
    wide = boxes.size > 1
    broken = np.zeros(len(boxes.tensor), bool)
    for dim in range(shapes.shape[1] - 1):
        broken |= wide[:, dim] & any_of(partial[:, dim + 1 :])
    flat = np.ones(len(shapes), bool)
    flat[boxes.tensor[broken]] = False
    return flat


def flattened(pieces: Pieces, shapes: Ints, flat: Flags) -> Pieces:
    """Make the pieces of flat tensors one-dimensional, and join those that lie behind one
    another."""
    mine = flat[pieces.boxes.tensor]
    tensor = pieces.boxes.tensor
    at = np.zeros(len(tensor), np.int64)
    for place, step in zip(pieces.boxes.start.T, strides(shapes).T, strict=True):
        at += place * step[tensor]
    length = pieces.boxes.volume
    goes_on = np.zeros(len(tensor), bool)
    goes_on[1:] = (
        mine[1:]
        & (tensor[1:] == tensor[:-1])
        & (pieces.buffer[1:] == pieces.buffer[:-1])
        & (at[1:] == at[:-1] + length[:-1])
        & (pieces.offset[1:] == pieces.offset[:-1] + length[:-1])
    )
    if flat.all():
        start, size = at[:, None], length[:, None].copy()
    else:
        start = np.where(mine[:, None], 0, pieces.boxes.start)
        size = np.where(mine[:, None], 1, pieces.boxes.size)
        start[:, 0] += np.where(mine, at, 0)
        size[:, 0] *= np.where(mine, length, 1)
    made = Pieces(pieces.rank, pieces.buffer, pieces.offset, Boxes(tensor, start, size))
    if not goes_on.any():
        return made
    heads = np.flatnonzero(~goes_on)
    joined = np.add.reduceat(length, heads)
    made = made.take(heads)
    made.boxes.size[mine[heads], 0] = joined[mine[heads]]
    return made


def regions_of(pieces: Pieces) -> Regions:
    """Put pieces of the same box together."""
    return _put_together(pieces.boxes, np.arange(len(pieces.rank)), pieces.rank)


def disjoint(regions: Regions, pieces: Pieces, tensors: int) -> Regions:
    """Cut source regions that overlap without being equal, so that no element is in two of them."""
    a, _ = overlapping(regions.boxes, tensors)
    if len(a) == 0:
        return regions
    cut = distinct(regions.boxes.tensor[a])
    affected = np.isin(regions.boxes.tensor, cut)
    boxes, origin = regions.boxes, np.arange(len(regions.boxes.tensor))
    for dim in range(boxes.start.shape[1]):
        boxes, origin = _cut_along(boxes, origin, affected[origin], dim)
    owner, number = spread(regions.copies[origin])
    holders = regions.holders[regions.first[origin[owner]] + number]
    return _put_together(boxes.take(owner), holders, pieces.rank[holders])


def _put_together(boxes: Boxes, holders: Ints, rank: Ints) -> Regions:
    """Group rows of equal boxes; order the regions by tensor and first element."""
    tensor, start, size = boxes
    order = ordered_by([tensor, *start.T, *size.T, rank])
    tensor, start, size = tensor[order], rows_of(start, order), rows_of(size, order)
    new = np.ones(len(order), bool)
    new[1:] = tensor[1:] != tensor[:-1]
    for column in (*start.T, *size.T):
        new[1:] |= column[1:] != column[:-1]
    heads = np.flatnonzero(new)
    first = np.append(heads, len(order))
    return Regions(Boxes(tensor[heads], start[heads], size[heads]), first, holders[order])


def overlapping(boxes: Boxes, tensors: int) -> tuple[Ints, Ints]:
    """Return pairs of rows of different boxes that share elements, each in both orders.

    Boxes are ordered by tensor and start, so where none meets the next in the first dimension all
    are apart.
    """
    tensor, low = boxes.tensor, boxes.start[:, 0]
    high = low + boxes.size[:, 0]
    meets = (tensor[1:] == tensor[:-1]) & (low[1:] < high[:-1])
    suspects = np.zeros(tensors, bool)
    suspects[tensor[1:][meets]] = True
    rows = np.flatnonzero(suspects[tensor])
    if not len(rows):
        return rows, rows
    some = boxes.take(rows)
    a, b = overlaps(some, some, tensors)
    return rows[a[a != b]], rows[b[a != b]]


def _cut_along(boxes: Boxes, origin: Ints, affected: Flags, dim: int) -> tuple[Boxes, Ints]:
    """Cut the affected boxes at every start and stop that their tensor has in this dimension."""
    start, stop = boxes.start[:, dim], boxes.start[:, dim] + boxes.size[:, dim]
    width = int(stop.max(initial=0)) + 1
    line = boxes.tensor * width
    points = distinct(np.concatenate([line + start, line + stop]))
    first = np.searchsorted(points, line + start)
    count = np.where(affected, np.searchsorted(points, line + stop) - first, 1)
    owner, number = spread(count)
    cut = boxes.take(owner)
    inside = affected[owner]
    low = points[first[owner] + number] - line[owner]
    high = points[np.minimum(first[owner] + number + 1, len(points) - 1)] - line[owner]
    cut.start[inside, dim] = low[inside]
    cut.size[inside, dim] = (high - low)[inside]
    return cut, origin[owner]
