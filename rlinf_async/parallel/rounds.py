"""Moves in rounds: in none of them does any rank send, or receive, more than a bucket.

An executor needs memory for one round beside the new shards, and frees it before the next. Rounds
are one order for all ranks, and a rank goes through its own in that order, so nobody waits in a
circle; ranks that have nothing in a round skip it.

Moves are taken tensor by tensor, so what has left the old layout early can be freed early.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rlinf_async.parallel.boxes import Boxes
from rlinf_async.parallel.columns import Flags, Ints, in_order, spread
from rlinf_async.parallel.plan import Plan


def in_rounds(plan: Plan, bucket_bytes: int) -> Plan:
    """Return the same plan with `Plan.round`, moves cut where they are larger than a bucket.

    A bucket smaller than a row of a box counts as one row. Raises `ValueError` below 1 byte.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
    cut = _cut(plan, bucket_bytes)
    cut = cut.take(in_order(cut.boxes.tensor))
    when = _rounds(cut, bucket_bytes)
    made = dataclasses.replace(cut, round=when)
    width = int(made.to_rank.max(initial=0)) + 1
    return made.take(np.lexsort((made.from_rank * width + made.to_rank, when)))


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


def _rounds(plan: Plan, bucket_bytes: int) -> Ints:
    """Number the rounds: a new one wherever the next moves would overfill a rank's bucket."""
    ranks = max(int(plan.from_rank.max(initial=0)), int(plan.to_rank.max(initial=0))) + 1
    amount = np.where(plan.is_local, 0, plan.bytes)
    when = np.zeros(len(amount), np.int64)
    filled = np.zeros((2, ranks), np.int64)
    now = 0
    starts = np.flatnonzero(np.diff(plan.boxes.tensor, prepend=-1))
    for low, high in zip(starts, np.append(starts[1:], len(amount)), strict=True):
        rows = np.arange(low, high)
        while len(rows):
            fits = _fits(plan, amount, rows, filled, bucket_bytes)
            if not fits.any() and filled.any():
                now, filled[:] = now + 1, 0
                continue
            if not fits.any():
                fits[0] = True
            taken = rows[fits]
            when[taken] = now
            np.add.at(filled[0], plan.from_rank[taken], amount[taken])
            np.add.at(filled[1], plan.to_rank[taken], amount[taken])
            rows = rows[~fits]
    return when


def _fits(plan: Plan, amount: Ints, rows: Ints, filled: Ints, bucket_bytes: int) -> Flags:
    """Which of the rows go in this round: those before their ranks' buckets are full."""
    sent = _running(plan.from_rank[rows], amount[rows]) + filled[0][plan.from_rank[rows]]
    received = _running(plan.to_rank[rows], amount[rows]) + filled[1][plan.to_rank[rows]]
    fits: Flags = np.logical_and(sent <= bucket_bytes, received <= bucket_bytes)
    return fits


def _running(rank: Ints, amount: Ints) -> Ints:
    """Return for each row the sum of the amounts of its rank up to and with it."""
    order = np.argsort(rank, kind="stable")
    total = np.cumsum(amount[order])
    ordered = rank[order]
    first = np.searchsorted(ordered, ordered)
    before = np.concatenate([[0], total])[first]
    running = np.empty_like(amount)
    running[order] = total - before
    return running
