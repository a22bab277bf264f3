"""Arithmetic of plans on columns of numbers, millions of rows long: which boxes of tensors overlap,
who holds the same region, and who of them sends it.

A table of boxes has ``tensor`` ``[n]``, ``start`` and ``size`` ``[n, D]``; tensors of fewer than D
dimensions have trailing extents of 1. Tensors that both layouts hold in flat ranges (all FSDP and
distributed-optimizer shards, column-parallel slices) are treated as one-dimensional: ranges then
need not be cut into boxes, and neighbours are one. A *region* is a box that pieces of several ranks
hold; source regions are made disjoint.

A *pool* is a set of ranks that hold the same regions; what others need of them may come from any
rank of the pool. Levelling pours each pool's bytes onto its least loaded ranks, again and again
until nothing moves (block coordinate descent on the sum of squared loads, a convex problem whose
minimum also has the least possible maximum). Then the pool's items are laid end to end on a line
of bytes, the line is cut at the ranks' quotas, and an item that crosses a cut is cut there too
when it is large enough to matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """Return for ``counts`` [2, 0, 3] the owners [0, 0, 2, 2, 2] and the numbers [0, 1, 0, 1,
    2]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - first[owner]


def rows_of(table: Ints, rows: Ints) -> Ints:
    """Return some rows of a table ``[n, D]`` (indexing takes four times as long)."""
    found: Ints = np.take(table, rows, axis=0, mode="clip")
    return found


def distinct(values: Ints) -> Ints:
    """Return the values in order, each once (faster than `np.unique` on millions)."""
    ordered = np.sort(values, kind="stable")
    return ordered[np.diff(ordered, prepend=-1) > 0]


def ordered_by(keys: Sequence[Ints]) -> Ints:
    """Return the order of rows by several columns of non-negative numbers, the first decides first;
    rows that are equal in all stay as they are.

    Columns that fit into one word together are sorted as one: `np.lexsort` sorts once for each.
    """
    extents = [int(key.max(initial=0)) + 1 for key in keys]
    if math.prod(extents) >= 1 << 63:
        apart: Ints = np.lexsort(keys[::-1])
        return apart
    word = np.zeros(len(keys[0]), np.int64)
    for key, extent in zip(keys, extents, strict=True):
        word = word * extent + key
    return np.argsort(word, kind="stable")


class Boxes(NamedTuple):
    """A table of boxes."""

    tensor: Ints
    start: Ints
    size: Ints

    def take(self, rows: Ints) -> Boxes:
        """Return some of the rows."""
        return Boxes(self.tensor[rows], rows_of(self.start, rows), rows_of(self.size, rows))

    @property
    def volume(self) -> Ints:
        """``[n]``: elements of each box."""
        return volume(self.size)


def volume(size: Ints) -> Ints:
    """Return the elements of boxes of these sizes ``[n, D]``."""
    product = np.ones(len(size), np.int64)
    for extent in size.T:
        product *= extent
    return product


def strides(size: Ints) -> Ints:
    """Return the row-major strides ``[n, D]`` of boxes that lie without gaps."""
    inner = np.ones_like(size)
    for dim in range(size.shape[1] - 2, -1, -1):
        inner[:, dim] = inner[:, dim + 1] * size[:, dim + 1]
    return inner


def cut_ranges(size: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut elements ``start .. stop`` of boxes ``size [n, D]`` (row-major) into sub-boxes.

    Returns ``(row, at, box start, box size)``: of which range it is, which element of the whole
    box comes first, and the sub-box. In a rank's memory a sub-box follows the one before. At most
    ``2 D - 1`` each; one where the range is of whole rows. Empty ranges give none."""
    dims = size.shape[1]
    inner = strides(size)
    row = np.flatnonzero(stop > start)
    low, high = start[row], stop[row]
    prefix = np.zeros((len(row), dims), np.int64)
    done: list[tuple[Ints, Ints, Ints, Ints]] = []
    for dim in range(dims):
        step = inner[row, dim]
        first, last = low // step, -(-high // step)
        # A range within one row goes down a dimension; others leave whole rows and two parts.
        whole_low, whole_high = -(-low // step), high // step
        in_one = (last - first == 1) & ~((low % step == 0) & (high % step == 0))
        middle = np.flatnonzero(~in_one & (whole_high > whole_low))
        box_start, box_size = prefix[middle].copy(), np.ones((len(middle), dims), np.int64)
        box_start[:, dim] = whole_low[middle]
        box_size[:, dim] = (whole_high - whole_low)[middle]
        box_size[:, dim + 1 :] = size[row[middle], dim + 1 :]
        at = (box_start * inner[row[middle]]).sum(axis=1)
        done.append((row[middle], at, box_start, box_size))
        one = np.flatnonzero(in_one)
        head = np.flatnonzero(~in_one & (low % step != 0))
        tail = np.flatnonzero(~in_one & (high % step != 0))
        parts = np.concatenate([one, head, tail])
        index = np.concatenate([first[one], first[head], whole_high[tail]])
        base = index * step[parts]
        prefix = prefix[parts]
        prefix[:, dim] = index
        low = np.concatenate([low[one], low[head], base[len(one) + len(head) :]]) - base
        high = np.concatenate([high[one], (first[head] + 1) * step[head], high[tail]]) - base
        row = row[parts]
        if not len(row):
            break
    if len(done) == 1:
        return done[0]
    columns = [np.concatenate(column) for column in zip(*done, strict=True)]
    order = ordered_by(columns[:2])
    return columns[0][order], columns[1][order], columns[2][order], columns[3][order]


def overlaps(old: Boxes, new: Boxes, tensors: int) -> tuple[Ints, Ints]:
    """Return the pairs ``(row of old, row of new)`` whose boxes share elements, ordered by new,
    then old.

    Sweeps each tensor along the dimension in which it is cut into most slots, and compares only
    boxes that meet in a slot."""
    along = _busiest_dimension(old, new, tensors)
    line_old, line_new = along[old.tensor], along[new.tensor]
    rows_old, rows_new = np.arange(len(old.tensor)), np.arange(len(new.tensor))
    extent = np.zeros(tensors, np.int64)
    old_start, old_size = old.start[rows_old, line_old], old.size[rows_old, line_old]
    new_start, new_size = new.start[rows_new, line_new], new.size[rows_new, line_new]
    np.maximum.at(extent, old.tensor, old_start + old_size)
    np.maximum.at(extent, new.tensor, new_start + new_size)
    base = np.cumsum(extent) - extent
    old_start, new_start = old_start + base[old.tensor], new_start + base[new.tensor]
    points = distinct(np.stack([old_start, old_start + old_size], axis=1).ravel())
    first_old = np.searchsorted(points, old_start)
    slots_old = np.searchsorted(points, old_start + old_size) - first_old
    owner, number = spread(slots_old)
    slot = first_old[owner] + number
    by_slot = np.argsort(slot, kind="stable")
    members = owner[by_slot]
    first_of = np.concatenate([[0], np.cumsum(np.bincount(slot, minlength=len(points)))])
    first_new = np.maximum(np.searchsorted(points, new_start, "right") - 1, 0)
    last_new = np.searchsorted(points, new_start + new_size)
    wanted, number = spread(np.maximum(last_new - first_new, 0))
    wanted_slot = first_new[wanted] + number
    meeting, number = spread(first_of[wanted_slot + 1] - first_of[wanted_slot])
    a, b = members[first_of[wanted_slot[meeting]] + number], wanted[meeting]
    unwanted = _elsewhere_apart(old, new, a, b, along)
    if int(slots_old.max(initial=1)) > 1:
        # Two boxes that meet in several slots are counted in the first of them.
        unwanted |= wanted_slot[meeting] != np.maximum(first_old[a], first_new[b])
    if unwanted.any():
        keep = np.flatnonzero(~unwanted)
        a, b = a[keep], b[keep]
    order = ordered_by([b, a])
    return a[order], b[order]


def _elsewhere_apart(old: Boxes, new: Boxes, a: Ints, b: Ints, along: Ints) -> Flags:
    """Whether pairs that meet in the dimension ``along`` of their tensor do not meet in others."""
    apart = np.zeros(len(a), bool)
    for dim in range(old.start.shape[1]):
        if (along == dim).all():
            continue
        apart |= old.start[:, dim][a] >= (new.start[:, dim] + new.size[:, dim])[b]
        apart |= new.start[:, dim][b] >= (old.start[:, dim] + old.size[:, dim])[a]
    return apart


def common(old: Boxes, new: Boxes, a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """Return start and size of what pairs of boxes share."""
    start = np.maximum(rows_of(old.start, a), rows_of(new.start, b))
    stop = np.minimum(rows_of(old.start + old.size, a), rows_of(new.start + new.size, b))
    return start, stop - start


def _busiest_dimension(old: Boxes, new: Boxes, tensors: int) -> Ints:
    dims = old.start.shape[1]
    if dims == 1:
        return np.zeros(tensors, np.int64)
    slots = np.zeros((dims, tensors), np.int64)
    if not old.start[:, 1:].any() and not new.start[:, 1:].any():
        return np.zeros(tensors, np.int64)
    for tensor, start, _ in (old, new):
        for dim in range(dims):
            if start[:, dim].any():
                width = int(start[:, dim].max()) + 1
                found = distinct(tensor * width + start[:, dim])
                slots[dim] += np.bincount(found // width, minlength=tensors)
    busiest: Ints = np.argmax(slots, axis=0)
    return busiest


SWEEPS = 50
"""most sweeps over the pools"""
SETTLED = 1e-3
"""a sweep that changes no load by more than this part of the highest is the last"""
SLACK = 0.08
"""excess over the level, as a share of it, up to which items are not cut"""
FINE = 32
"""number of rows from which on a box is cut along its first dimension"""


class Items(NamedTuple):
    """Sub-boxes to be sent, each from any rank of its pool."""

    pool: Ints
    start: Ints
    size: Ints
    item_bytes: Ints
    to_rank: Ints

    @property
    def bytes(self) -> Ints:
        """``[items]``"""
        return volume(self.size) * self.item_bytes


class Parts(NamedTuple):
    """The parts into which items were cut, those of an item one behind another."""

    item: Ints
    member: Ints
    """index into the pool's ranks"""
    start: Ints
    size: Ints


def pools_of(first: Ints, ranks: Ints) -> tuple[Ints, list[Ints]]:
    """Give every row of a ragged table ``ranks[first[i] : first[i + 1]]`` the number of its set.

    Returns ``(pool of each row, ranks of each pool)``. Rows are ordered.
    """
    count = np.diff(first)
    pool = np.zeros(len(count), np.int64)
    members: list[Ints] = []
    for length in np.unique(count):
        rows = np.flatnonzero(count == length)
        table = ranks[first[rows][:, None] + np.arange(length)]
        number = np.zeros(len(rows), np.int64)
        example = np.zeros(1, np.int64)
        for column in table.T:
            key = number * (int(ranks.max()) + 1) + column
            _, example, number = np.unique(key, return_index=True, return_inverse=True)
        pool[rows] = number + len(members)
        members += list(table[example])
    return pool, members


def level(pools: list[Ints], demand: Ints, forced: Floats) -> list[Floats]:
    """Return how many bytes each member of each pool should send.

    ``forced`` is ``[ranks]``: the bytes that a rank sends in any case.
    """
    load = forced.copy()
    shares = [np.zeros(len(members)) for members in pools]
    order = sorted(range(len(pools)), key=lambda pool: len(pools[pool]))
    for _ in range(SWEEPS):
        before = load.copy()
        for pool in order:
            load[pools[pool]] -= shares[pool]
            shares[pool] = _spread_evenly(load[pools[pool]], float(demand[pool]))
            load[pools[pool]] += shares[pool]
        if np.abs(load - before).max(initial=0) <= SETTLED * load.max(initial=0):
            break
    return shares


def assign(items: Items, pools: list[Ints], forced: Floats) -> tuple[Ints, Parts]:
    """Say which member of its pool sends each item, cutting items where that levels the traffic.

    Every rank's bytes stay within 10 % of the least possible maximum, but for what one row of a
    box weighs. Returns ``[items]`` members, and what goes instead of the items that are cut."""
    bytes_ = items.bytes
    demand = np.bincount(items.pool, bytes_, len(pools)).astype(np.int64)
    shares = level(pools, demand, forced)
    cuts, member = _cuts(shares, demand)
    # Items lie on the line by pool and receiver; millions of rows are moved there only for this.
    order = ordered_by([items.pool, items.to_rank])
    size = bytes_[order]
    stop = np.cumsum(size)
    start = stop - size
    busiest = _busiest(pools, shares, forced)
    used = np.bincount(np.concatenate(pools)).max(initial=1)
    whole = size <= busiest * SLACK / used
    first = np.searchsorted(cuts, np.where(whole, (start + stop) // 2, start), "right") - 1
    last = np.searchsorted(cuts, stop) - 1
    segment = np.empty_like(first)
    segment[order] = first
    several = np.flatnonzero(~whole & (last > first))
    parts = _parts(items, order[several], start[several], first[several], last[several], cuts)
    return member[segment], parts._replace(member=member[parts.member])


def _parts(items: Items, item: Ints, start: Ints, first: Ints, last: Ints, cuts: Ints) -> Parts:
    """Cut items that lie from ``start`` on the line, in segments ``first`` to ``last``, there.

    `Parts.member` of what is returned is the segment."""
    boxes = items.size[item]
    size = volume(boxes) * items.item_bytes[item]
    row_start, row_size, dim = _rows(items.start[item], boxes)
    owner, number = spread(last - first + 1)
    segment = first[owner] + number
    begin, end = np.zeros(len(owner), np.int64), row_size[owner]
    for side, rows in ((begin, number > 0), (end, segment < last[owner])):
        cut = np.flatnonzero(rows)
        at = cuts[segment[cut] + (side is end)] - start[owner[cut]]
        side[cut] = _row_at(at, size, row_size, owner[cut])
    keep = np.flatnonzero(end > begin)
    owner, segment, begin, end = owner[keep], segment[keep], begin[keep], end[keep]
    box_start, box_size = items.start[item[owner]], items.size[item[owner]]
    each, along = np.arange(len(owner)), dim[owner]
    box_start[each, along] = row_start[owner] + begin
    box_size[each, along] = end - begin
    return Parts(item[owner], segment, box_start, box_size)


def _spread_evenly(load: Floats, amount: float) -> Floats:
    """Spread ``amount`` so that the lowest loads become level."""
    order = np.argsort(load, kind="stable")
    ordered = load[order]
    levels = (amount + np.cumsum(ordered)) / np.arange(1, len(load) + 1)
    count = int(np.flatnonzero(levels > ordered)[-1]) + 1
    poured: Floats = np.maximum(levels[count - 1] - load, 0.0)
    poured[order[count:]] = 0.0
    return poured


def _cuts(shares: list[Floats], demand: Ints) -> tuple[Ints, Ints]:
    """Where each member's part of the line of bytes starts, and which member of its pool it is."""
    base = np.cumsum(demand) - demand
    starts, members = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for pool, share in enumerate(shares):
        ends = np.round(np.cumsum(share)).astype(np.int64)
        starts.append(base[pool] + np.concatenate([[0], np.minimum(ends[:-1], demand[pool])]))
        members.append(np.arange(len(share)))
    return np.concatenate(starts), np.concatenate(members)


def _busiest(pools: list[Ints], shares: list[Floats], forced: Floats) -> float:
    load = forced.copy()
    for members, share in zip(pools, shares, strict=True):
        load[members] += share
    return float(load.max(initial=0))


def _rows(start: Ints, size: Ints) -> tuple[Ints, Ints, Ints]:
    """Return first row, rows, and the dimension along which each box can be cut."""
    dim = np.argmax(size, axis=1)
    for place in reversed(range(size.shape[1])):
        dim[size[:, place] >= FINE] = place
    each = np.arange(len(size))
    return start[each, dim], size[each, dim], dim


def _row_at(distance: Ints, size: Ints, rows: Ints, owner: Ints) -> Ints:
    """Return the row boundary next to a distance in bytes from the item's start."""
    at = np.round(distance / size[owner] * rows[owner]).astype(np.int64)
    clipped: Ints = np.clip(at, 0, rows[owner])
    return clipped


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
        broken |= wide[:, dim] & partial[:, dim + 1 :].any(axis=1)
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
    tensor, start, size = tensor[order], start[order], size[order]
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
