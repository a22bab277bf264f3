"""Boxes of tensors as arrays of numbers: cutting flat ranges into boxes, and finding which boxes
overlap.

A table of boxes has ``tensor`` ``[n]``, ``start`` and ``size`` ``[n, D]``; tensors of fewer than D
dimensions have trailing extents of 1. All of it is vectorised: tables have millions of rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlinf_async.parallel.columns import (
    Flags,
    Ints,
    distinct,
    in_order,
    ordered_by,
    rows_of,
    spread,
)


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
    by_slot = in_order(slot)
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
