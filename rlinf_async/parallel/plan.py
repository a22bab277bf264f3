"""A plan from one layout to another: which rank sends which box to which rank, and when.

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

A rank's part are *runs*: views of buffers that any array library can read and write. A run is a
box on both sides; boxes that lie behind one another without gaps on both sides are one run. The
order of the runs between two ranks is the same on both: by round, then by where the sender has
them.

*Rounds*: in none of them does any rank send, or receive, more than a bucket. An executor needs
memory for one round beside the new shards, and frees it before the next. Rounds are one order for
all ranks, and a rank goes through its own in that order, so nobody waits in a circle; ranks that
have nothing in a round skip it. All receivers advance alike: in each round every one gets about the
same part of what it gets in all, tensor by tensor. Where one had its moves before another's, the
second would wait for the first's rounds to end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rlinf_async.parallel.groups import Layout, widened
from rlinf_async.parallel.regions import (
    Boxes,
    Flags,
    Ints,
    Items,
    Pieces,
    Regions,
    assign,
    common,
    disjoint,
    distinct,
    flat_tensors,
    flattened,
    ordered_by,
    overlaps,
    pools_of,
    regions_of,
    spread,
    strides,
    volume,
)
from rlinf_async.parallel.splits import ModelMismatch, NotHeld, PlanTooLarge, nearest_names
from rlinf_async.parallel.strategy import GlobalTensor, describe


class BufferView(NamedTuple):
    """Elements of a buffer, as in ``torch.as_strided(buffer, size, stride, offset)``."""

    buffer: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """elements, not bytes"""
    offset: int
    """elements of the whole buffer, seen flat, before the first"""


class BufferRun(NamedTuple):
    """A move of one rank. Source and target views have the same size."""

    source_rank: int
    target_rank: int
    source: BufferView
    target: BufferView
    tensors: tuple[str, ...]
    """names of the global tensors in it"""
    elements: int
    bytes: int
    """size in the new layout's dtype"""
    round: int


class RankPlan(NamedTuple):
    """One rank's part of a plan."""

    rank: int
    copies: tuple[BufferRun, ...]
    """runs from its old buffers to its new ones"""
    sends: tuple[BufferRun, ...]
    receives: tuple[BufferRun, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """Moves as columns. Made by `plan`, in an order that the two layouts decide."""

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


def _runs(moves: Plan) -> list[BufferRun]:
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
        BufferRun(
            int(moves.from_rank[head]),
            int(moves.to_rank[head]),
            BufferView(_name(moves.old, int(buffer[head])), size, source_view, int(at[head])),
            BufferView(_name(moves.new, int(to_buffer[head])), size, target_view, int(to[head])),
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


MOST_MOVES = 1 << 25
"""most moves of a plan, which holds them all in memory"""


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
        volume(demand.boxes.size[only]) * item_bytes[demand.boxes.tensor[only]],
        int(source.rank.max(initial=0)) + 1,
    ).astype(np.float64)
    open_rows = np.flatnonzero(sender < 0)
    if len(open_rows) == 0:
        return Plan(old, new, source, target, demand.boxes, sender, demand.target_piece)
    asked, region = np.unique(demand.region[open_rows], return_inverse=True)
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
        start, size = start[kept], size[kept]
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


PASSES = 4
"""number of attempts to fit further moves into the same round"""
STEPS = 1 << 15
"""steps into which the way of a receiver is divided: the order of moves tells no finer ones apart
"""


def in_rounds(plan: Plan, bucket_bytes: int) -> Plan:
    """Return the same plan with `Plan.round`, moves cut where they are larger than a bucket.

    A bucket smaller than a row of a box counts as one row. Raises `ValueError` below 1 byte.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
    cut = _cut(plan, bucket_bytes)
    cut = cut.take(ordered_by([cut.boxes.tensor, cut.from_rank, cut.to_rank]))
    cut = cut.take(np.argsort(_progress(cut), kind="stable"))
    when = _rounds(cut, bucket_bytes)
    made = dataclasses.replace(cut, round=when)
    width = int(made.to_rank.max(initial=0)) + 1
    return made.take(ordered_by([when, made.from_rank * width + made.to_rank]))


def _cut(plan: Plan, bucket_bytes: int) -> Plan:
    """Cut sent moves along their longest dimension into parts of at most a bucket."""
    size, bytes_ = plan.boxes.size, plan.bytes
    dim = np.argmax(size, axis=1)
    rows = size[np.arange(len(dim)), dim]
    per_part = np.maximum(1, bucket_bytes // np.maximum(bytes_ // np.maximum(rows, 1), 1))
    parts = np.where(plan.is_local, 1, -(-rows // per_part))
    owner, number = spread(parts)
    made = plan.take(owner)
    boxes = Boxes(made.boxes.tensor, made.boxes.start.copy(), made.boxes.size.copy())
    each = np.arange(len(owner))
    inside = np.where(parts[owner] > 1, number * per_part[owner], 0)
    length = np.where(parts[owner] > 1, np.minimum(per_part, rows)[owner], rows[owner])
    boxes.start[each, dim[owner]] += inside
    boxes.size[each, dim[owner]] = np.minimum(length, rows[owner] - inside)
    return dataclasses.replace(made, boxes=boxes)


def _progress(plan: Plan) -> Ints:
    """How far its receiver is with each move, of `STEPS`; what stays on a rank is in no round."""
    amount = np.where(plan.is_local, 0, plan.bytes)
    total = np.bincount(plan.to_rank, amount)[plan.to_rank]
    before = _running(plan.to_rank, amount) - amount
    progress: Ints = (before * (STEPS / np.maximum(total, 1))).astype(np.int64)
    return progress


class _Moves(NamedTuple):
    """The moves of a plan, each column ``[moves]``."""

    from_rank: Ints
    to_rank: Ints
    amount: Ints
    """bytes of each move"""

    def take(self, rows: Ints) -> _Moves:
        """Return some of the rows."""
        return _Moves(*(column[rows] for column in self))


def _rounds(plan: Plan, bucket_bytes: int) -> Ints:
    """Number the rounds. Each looks only at the first moves, as many as could fill all buckets."""
    when = np.zeros(len(plan.bytes), np.int64)
    away = np.flatnonzero(~plan.is_local)
    if not len(away):
        return when
    moves = _Moves(plan.from_rank, plan.to_rank, plan.bytes)
    least = min(len(distinct(moves.from_rank[away])), len(distinct(moves.to_rank[away])))
    before = np.concatenate([[0], np.cumsum(moves.amount[away])])
    waiting, at, now = away[:0], 0, 0
    while at < len(away) or len(waiting):
        room = least * bucket_bytes - int(moves.amount[waiting].sum())
        stop = int(np.searchsorted(before, before[at] + max(0, room), "right")) - 1
        stop = max(stop, at if len(waiting) else at + 1)
        waiting, at = np.concatenate([waiting, away[at:stop]]), stop
        taken = _filling(moves.take(waiting), bucket_bytes)
        when[waiting[taken]] = now
        waiting, now = waiting[~taken], now + 1
    return when


def _filling(moves: _Moves, bucket_bytes: int) -> Flags:
    """Return which moves go into one round: in order, as long as their ranks' buckets have room."""
    ranks = max(int(moves.from_rank.max()), int(moves.to_rank.max())) + 1
    filled = np.zeros((2, ranks), np.int64)
    taken = np.zeros(len(moves.amount), bool)
    rows = np.arange(len(taken))
    for _ in range(PASSES):
        some = moves.take(rows)
        sent = _running(some.from_rank, some.amount) + filled[0][some.from_rank]
        received = _running(some.to_rank, some.amount) + filled[1][some.to_rank]
        fits = np.logical_and(sent <= bucket_bytes, received <= bucket_bytes)
        if not fits.any():
            break
        taken[rows[fits]] = True
        for side, rank in zip(filled, (some.from_rank, some.to_rank), strict=True):
            side += np.bincount(rank[fits], some.amount[fits], ranks).astype(np.int64)
        rows = rows[~fits]
        if not len(rows):
            break
    if not taken.any():
        taken[0] = True  # a row that is larger than a bucket goes alone
    return taken


def _running(rank: Ints, amount: Ints) -> Ints:
    """Return for each row the sum of the amounts of its rank up to and with it."""
    order = np.argsort(rank, kind="stable")
    total = np.cumsum(amount[order])
    ordered = rank[order]
    heads = np.flatnonzero(np.diff(ordered, prepend=-1))
    before = np.repeat(total[heads] - amount[order[heads]], np.diff(heads, append=len(rank)))
    running = np.empty_like(amount)
    running[order] = total - before
    return running
