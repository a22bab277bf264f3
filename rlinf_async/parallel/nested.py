"""The order in which ranks hold shards, so that another number of ranks finds much where it is.

::

    shard            0 1 2 3 4 5 6 7
    2 ranks    held  0       1
    4 ranks    by    0   2   1   3
    8 ranks          0 4 2 6 1 5 3 7
    3 ranks          0  2  1

A rank has the same place among any number of ranks, as far as there are places: the order of n is
that of n + 1 without the last rank. So the size alone says it, whatever the sizes before were.
"""

from __future__ import annotations


def nested_order(ranks: int) -> tuple[int, ...]:
    """Return which of ``0 .. ranks - 1`` holds shard 0, 1, ...: by their van der Corput numbers.

    That of a rank is its binary digits, the lowest first, behind the point. Where powers of two
    double or halve, every rank keeps all that it can, and half of the bytes travel; in the natural
    order three quarters do from 2 to 4 ranks, seven eighths from 4 to 8. No other change leaves
    less in place than in the natural order, but for tensors whose rows the ranks do not divide.
    """
    digits = max(ranks - 1, 0).bit_length()
    return tuple(sorted(range(ranks), key=lambda rank: f"{rank:0{digits}b}"[::-1]))
