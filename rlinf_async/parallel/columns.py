"""Columns of numbers, millions of rows long: operations that numpy lacks, or has slower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

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


def in_order(keys: Ints) -> Ints:
    """Return the order of rows by non-negative numbers; rows of equal ones stay as they are.

    Sorting key and row number as one word is several times as fast as a stable argsort."""
    if _ascends(keys):
        return np.arange(len(keys))
    bits, most = len(keys).bit_length(), int(keys.max(initial=0))
    if most < 1 << 32:
        # numpy's stable argsort of 16 bits is a radix sort.
        order: Ints = np.argsort(keys.astype(np.uint16), kind="stable")
        if most >= 1 << 16:
            order = order[np.argsort((keys >> 16).astype(np.uint16)[order], kind="stable")]
        return order
    if most >> (62 - bits):
        wide: Ints = np.argsort(keys, kind="stable")
        return wide
    words = (keys << bits) | np.arange(len(keys))
    words.sort()
    words &= (1 << bits) - 1
    return words


def rows_of(table: Ints, rows: Ints) -> Ints:
    """Return some rows of a table ``[n, D]`` (indexing takes four times as long)."""
    found: Ints = np.take(table, rows, axis=0, mode="clip")
    return found


def any_of(table: Flags) -> Flags:
    """Return for each row whether any of its few columns is set (`np.any` goes row by row)."""
    found = np.zeros(len(table), bool)
    for column in table.T:
        found |= column
    return found


def distinct(values: Ints) -> Ints:
    """Return the values in order, each once (faster than `np.unique` on millions)."""
    ordered = values if _ascends(values) else np.sort(values)
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    kept: Ints = ordered[new]
    return kept


def numbered(values: Ints, below: int) -> tuple[Ints, Ints]:
    """Return the distinct values in order, and for each value which of them it is.

    Values are in ``0 .. below``; nothing is sorted."""
    there = np.zeros(below, bool)
    there[values] = True
    number = np.cumsum(there) - 1
    return np.flatnonzero(there), number[values]


def ordered_by(keys: Sequence[Ints]) -> Ints:
    """Return the order of rows by several columns of non-negative numbers, the first decides first.

    `np.lexsort` sorts once for each column; columns that fit one word together are sorted as one,
    and the words after the first only where they are not in order already.
    """
    words: list[Ints] = []
    room, wide = 0, 1 << (62 - len(keys[0]).bit_length())
    for key in keys:
        extent = int(key.max(initial=0)) + 1
        if words and room * extent <= wide:
            if extent > 1:
                words[-1] = words[-1] * extent + key
            room *= extent
        else:
            words.append(key)
            room = extent
    if len(words) == 1:
        return in_order(words[0])
    for most in (keys, words):
        order = in_order(most[0])
        if _in_order_within(most, order):
            return order
    several: Ints = np.lexsort(words[::-1])
    return several


def _ascends(keys: Ints) -> bool:
    """Whether no value is below the one before it."""
    return bool((keys[1:] >= keys[:-1]).all())


def _in_order_within(words: Sequence[Ints], order: Ints) -> bool:
    """Whether rows in this order are ordered by all words, given that they are by the first."""
    first = words[0][order]
    ties = np.flatnonzero(first[1:] == first[:-1])
    for word in words[1:]:
        before, after = word[order[ties]], word[order[ties + 1]]
        if (after < before).any():
            return False
        ties = ties[after == before]
    return True
