"""The choice of the rank that sends a region, among its holders: traffic is levelled over ranks.

A *pool* is a set of ranks that hold the same regions; what others need of them may come from any
rank of the pool. Levelling pours each pool's bytes onto its least loaded ranks, again and again
until nothing moves (block coordinate descent on the sum of squared loads, a convex problem whose
minimum also has the least possible maximum). Then the pool's items are laid end to end on a line
of bytes, the line is cut at the ranks' quotas, and an item that crosses a cut is cut there too
when it is large enough to matter."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlinf_async.parallel.boxes import volume
from rlinf_async.parallel.columns import Floats, Ints, ordered_by, rows_of, spread

SWEEPS = 50
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
            shares[pool] = _pour(load[pools[pool]], float(demand[pool]))
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
    boxes = rows_of(items.size, item)
    size = volume(boxes) * items.item_bytes[item]
    row_start, row_size, dim = _rows(rows_of(items.start, item), boxes)
    owner, number = spread(last - first + 1)
    segment = first[owner] + number
    begin, end = np.zeros(len(owner), np.int64), row_size[owner]
    for side, rows in ((begin, number > 0), (end, segment < last[owner])):
        cut = np.flatnonzero(rows)
        at = cuts[segment[cut] + (side is end)] - start[owner[cut]]
        side[cut] = _row_at(at, size, row_size, owner[cut])
    keep = np.flatnonzero(end > begin)
    owner, segment, begin, end = owner[keep], segment[keep], begin[keep], end[keep]
    box_start, box_size = rows_of(items.start, item[owner]), rows_of(items.size, item[owner])
    each, along = np.arange(len(owner)), dim[owner]
    box_start[each, along] = row_start[owner] + begin
    box_size[each, along] = end - begin
    return Parts(item[owner], segment, box_start, box_size)


def _pour(load: Floats, amount: float) -> Floats:
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
    dim = _longest(size)
    for place in reversed(range(size.shape[1])):
        dim[size[:, place] >= FINE] = place
    each = np.arange(len(size))
    return start[each, dim], size[each, dim], dim


def _longest(size: Ints) -> Ints:
    """Return the first of the largest extents of each row."""
    dim, most = np.zeros(len(size), np.int64), size[:, 0].copy()
    for place in range(1, size.shape[1]):
        longer = size[:, place] > most
        dim[longer] = place
        np.maximum(most, size[:, place], out=most)
    return dim


def _row_at(distance: Ints, size: Ints, rows: Ints, owner: Ints) -> Ints:
    """Return the row boundary next to a distance in bytes from the item's start."""
    at = np.round(distance / size[owner] * rows[owner]).astype(np.int64)
    clipped: Ints = np.clip(at, 0, rows[owner])
    return clipped
