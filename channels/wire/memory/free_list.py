"""The free parts of a memory range. Pure: numbers only."""

from __future__ import annotations

from bisect import bisect_left


class FreeList:
    """The free parts between two offsets, in order and never adjacent.

    First fit: the lowest part that is large enough is taken, so that the same memory, whose pages
    are allocated already, is used again and again.
    """

    def __init__(self, start: int, stop: int) -> None:
        self._whole = [(start, stop)]
        self._free = [(start, stop)]

    @property
    def idle(self) -> bool:
        """Whether all of the range is free."""
        return self._free == self._whole

    def take(self, size: int) -> int | None:
        """Take ``size`` bytes and return their offset; None where no free part is large enough."""
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                rest = [(start + size, stop)] if stop - start > size else []
                self._free[index : index + 1] = rest
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Free the ``size`` bytes that were taken at ``start``.

        Raises:
            ValueError: a part of these bytes is free, or lies outside of the range.
        """
        stop = start + size
        index = bisect_left(self._free, (start, stop))
        before = self._free[index - 1] if index else None
        after = self._free[index] if index < len(self._free) else None
        (low, high), overlaps = self._whole[0], (before and before[1] > start)
        if overlaps or (after and after[0] < stop) or start < low or stop > high or size < 1:
            raise ValueError(f"{size} bytes at {start} were not taken")
        first, last = index, index
        if before and before[1] == start:
            first, start = index - 1, before[0]
        if after and after[0] == stop:
            last, stop = index + 1, after[1]
        self._free[first:last] = [(start, stop)]
