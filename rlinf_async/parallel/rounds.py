"""Moves in rounds: in none of them does any rank send, or receive, more than a bucket.

An executor needs memory for one round beside the new shards, and frees it before the next. Rounds
are one order for all ranks, and a rank goes through its own in that order, so nobody waits in a
circle; ranks that have nothing in a round skip it.

All receivers advance alike: in each round every one gets about the same part of what it gets in
all, tensor by tensor. Where one had its moves before another's, the second would wait for the
first's rounds to end.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from rlinf_async.parallel.boxes import Boxes
from rlinf_async.parallel.columns import Flags, Ints, distinct, in_order, ordered_by, spread
from rlinf_async.parallel.plan import Plan

PASSES = 4
"""number of attempts to fit further moves into the same round"""
STEPS = 1 << 15
"""of a receiver's way, which the order of moves tells apart"""


def in_rounds(plan: Plan, bucket_bytes: int) -> Plan:
    """Return the same plan with `Plan.round`, moves cut where they are larger than a bucket.

    A bucket smaller than a row of a box counts as one row. Raises `ValueError` below 1 byte.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
    cut = _cut(plan, bucket_bytes)
    cut = cut.take(ordered_by([cut.boxes.tensor, cut.from_rank, cut.to_rank]))
    cut = cut.take(in_order(_progress(cut)))
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
    """bytes"""

    def take(self, rows: Ints) -> _Moves:
        """Return some of the rows."""
        return _Moves(*(column[rows] for column in self))


def _rounds(plan: Plan, bucket_bytes: int) -> Ints:
    """Number the rounds. Each looks only at so many of the moves as could fill all buckets."""
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
    """Which moves go into one round: in order, as long as their ranks' buckets have room."""
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
    order = in_order(rank)
    total = np.cumsum(amount[order])
    ordered = rank[order]
    heads = np.flatnonzero(np.diff(ordered, prepend=-1))
    before = np.repeat(total[heads] - amount[order[heads]], np.diff(heads, append=len(rank)))
    running = np.empty_like(amount)
    running[order] = total - before
    return running
