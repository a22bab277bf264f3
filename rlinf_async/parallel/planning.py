"""Making a plan from one layout to another: which rank sends which box to which rank.

::

    old pieces -> disjoint regions --+
                                     +--> overlaps --> local copies, and items --levelled--> moves
    new pieces -> distinct regions --+

Invariants (``tests/parallel`` holds them for random models and strategies):

- every element of every piece of the new layout is written by exactly one move;
- a move's source holds what it sends;
- what a rank has already is copied, never sent;
- no rank sends more than 1.1 x the least possible maximum, but for the row at which a box is cut;
- the same two layouts give the same plan on every rank, move for move.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlinf_async.parallel.balance import Items, assign, pools_of
from rlinf_async.parallel.boxes import Boxes, common, overlaps, volume
from rlinf_async.parallel.columns import Ints, numbered, rows_of, spread
from rlinf_async.parallel.errors import ModelMismatch, NotHeld, PlanTooLarge, nearest_names
from rlinf_async.parallel.groups import widened
from rlinf_async.parallel.layout import Layout
from rlinf_async.parallel.plan import Plan, item_bytes_of
from rlinf_async.parallel.regions import (
    Pieces,
    Regions,
    disjoint,
    flat_tensors,
    flattened,
    regions_of,
)
from rlinf_async.parallel.tensors import describe

MOST_MOVES = 1 << 25


def plan(old: Layout, new: Layout) -> Plan:
    """Return the moves that make ``new`` out of ``old``.

    Tensors that only ``old`` has are left behind; dtypes may differ (the sender converts). Raises
    `ModelMismatch` for other shapes or unknown names, `NotHeld` when elements are on no rank, and
    `PlanTooLarge` for more than 33 million moves.
    """
    source, target, shapes = _on_common_tensors(old, new)
    flat = np.logical_and(flat_tensors(source.boxes, shapes), flat_tensors(target.boxes, shapes))
    source, target = flattened(source, shapes, flat), flattened(target, shapes, flat)
    regions = disjoint(regions_of(source), source, len(shapes)).one_per_rank(source.rank)
    wanted = regions_of(target)
    a, b = overlaps(regions.boxes, wanted.boxes, len(shapes))
    copies = wanted.copies
    _check_size(int(copies[b].sum()))
    holder = wanted.first[b]
    if int(copies.max(initial=1)) > 1:
        overlap, number = spread(copies[b])
        a, b, holder = a[overlap], b[overlap], holder[overlap] + number
    start, size = common(regions.boxes, wanted.boxes, a, b)
    _check_covered(new, wanted, target, b, volume(size))
    demand = Demand(Boxes(wanted.boxes.tensor[b], start, size), a, wanted.holders[holder])
    return _moves(old, new, source, target, regions, demand)


class Demand(NamedTuple):
    """The boxes of source regions that new pieces need, ordered by tensor and box."""

    boxes: Boxes
    region: Ints
    target_piece: Ints

    def take(self, rows: Ints) -> Demand:
        """Return some of the rows."""
        return Demand(self.boxes.take(rows), self.region[rows], self.target_piece[rows])


def _moves(
    old: Layout, new: Layout, source: Pieces, target: Pieces, regions: Regions, demand: Demand
) -> Plan:
    """Meet the demand: by copies where the rank has it, by levelled traffic otherwise."""
    if len(regions.holders) == len(regions.boxes.tensor):
        # Every region is on one rank: nothing to choose.
        sender = regions.holders[demand.region]
        return Plan(old, new, source, target, demand.boxes, sender, demand.target_piece)
    sender = regions.at(demand.region, target.rank[demand.target_piece], source.rank)
    # Of what only one rank holds, that rank is the sender: nothing to choose.
    only = np.flatnonzero((sender < 0) & (regions.copies[demand.region] == 1))
    sender[only] = regions.holders[regions.first[demand.region[only]]]
    item_bytes = item_bytes_of(new.tensors)
    forced = np.bincount(
        source.rank[sender[only]],
        volume(rows_of(demand.boxes.size, only)) * item_bytes[demand.boxes.tensor[only]],
        int(source.rank.max(initial=0)) + 1,
    ).astype(np.float64)
    open_rows = np.flatnonzero(sender < 0)
    if len(open_rows) == 0:
        return Plan(old, new, source, target, demand.boxes, sender, demand.target_piece)
    asked, region = numbered(demand.region[open_rows], len(regions.copies))
    some = regions.take(asked)
    pool, pools = pools_of(some.first, source.rank[some.holders])
    chosen = demand.take(open_rows)
    items = Items(
        pool[region],
        chosen.boxes.start,
        chosen.boxes.size,
        item_bytes[chosen.boxes.tensor],
        target.rank[chosen.target_piece],
    )
    member, parts = assign(items, pools, forced)
    holders = some.first[region]
    sender[open_rows] = some.holders[holders + member]
    rows, holders = open_rows[parts.item], some.holders[holders[parts.item] + parts.member]
    head = np.diff(parts.item, prepend=-1) != 0
    first, more = np.flatnonzero(head), np.flatnonzero(~head)
    demand.boxes.start[rows[first]] = parts.start[first]
    demand.boxes.size[rows[first]] = parts.size[first]
    sender[rows[first]] = holders[first]
    boxes = Boxes(
        np.concatenate([demand.boxes.tensor, demand.boxes.tensor[rows[more]]]),
        np.concatenate([demand.boxes.start, parts.start[more]]),
        np.concatenate([demand.boxes.size, parts.size[more]]),
    )
    senders = np.concatenate([sender, holders[more]])
    targets = np.concatenate([demand.target_piece, demand.target_piece[rows[more]]])
    return Plan(old, new, source, target, boxes, senders, targets)


def _on_common_tensors(old: Layout, new: Layout) -> tuple[Pieces, Pieces, Ints]:
    """Number the tensors as the new layout does; return both sides' pieces and the shapes."""
    number = {tensor.name: index for index, tensor in enumerate(new.tensors)}
    known = {tensor.name: tensor for tensor in old.tensors}
    faults = [
        f"{tensor.name!r} is not in the old layout{nearest_names(tensor.name, known)}"
        if tensor.name not in known
        else f"{tensor.name!r} is {describe(known[tensor.name])} in the old layout, "
        f"{describe(tensor)} in the new one"
        for tensor in new.tensors
        if tensor.name not in known or known[tensor.name].shape != tensor.shape
    ]
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise ModelMismatch("; ".join(faults[:8]) + more)
    dims = max(1, *(len(tensor.shape) for tensor in new.tensors), 1)
    shapes = np.ones((len(new.tensors), dims), np.int64)
    for index, tensor in enumerate(new.tensors):
        shapes[index, : len(tensor.shape)] = tensor.shape
    renumber = np.array([number.get(tensor.name, -1) for tensor in old.tensors], np.int64)
    return _pieces(old, renumber, dims), _pieces(new, np.arange(len(new.tensors)), dims), shapes


def _pieces(layout: Layout, renumber: Ints, dims: int) -> Pieces:
    tensor = renumber[layout.boxes.tensor]
    rank, buffer, offset = layout.piece_rank, layout.piece_buffer, layout.piece_offset
    start, size = layout.boxes.start, layout.boxes.size
    if int(renumber.min(initial=0)) < 0:
        kept = np.flatnonzero(tensor >= 0)
        tensor, rank, buffer, offset = tensor[kept], rank[kept], buffer[kept], offset[kept]
        start, size = rows_of(start, kept), rows_of(size, kept)
    boxes = Boxes(tensor, widened(start, dims, 0)[:, :dims], widened(size, dims, 1)[:, :dims])
    return Pieces(rank, buffer, offset, boxes)


def _check_covered(new: Layout, wanted: Regions, target: Pieces, b: Ints, volumes: Ints) -> None:
    found = np.bincount(b, volumes, len(wanted.boxes.tensor)) // wanted.copies
    short = np.flatnonzero(found < wanted.boxes.volume)
    if not len(short):
        return
    first = int(short[0])
    tensor = new.tensors[int(wanted.boxes.tensor[first])]
    rank = int(target.rank[wanted.holders[wanted.first[first]]])
    raise NotHeld(
        f"{len(short)} slices of the new layout are not whole on the old ranks: the first is "
        f"of {tensor.name!r} {list(tensor.shape)} for rank {rank}, of whose "
        f"{int(wanted.boxes.volume[first])} elements {int(found[first])} are there. Give "
        "the old layout all ranks that hold the model"
    )


def _check_size(moves: int) -> None:
    if moves > MOST_MOVES:
        raise PlanTooLarge(
            f"a plan of {moves:,} moves is over the limit of {MOST_MOVES:,}: plan to one copy of "
            "the new layout, and from that to the others"
        )
