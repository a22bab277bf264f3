"""`Predictor`: how many tokens of a response are still to come."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray


class Predictor:
    """Expected tokens that are still to come, by the tokens so far: of the lengths that are longer
    than that, their mean.

    Args:
        lengths: of samples of the past.
    """

    def __init__(self, lengths: Collection[float] | NDArray[np.float64]) -> None:
        ordered = np.sort(np.fromiter(lengths, np.float64))
        above = np.cumsum(ordered[::-1])[::-1]
        # As lists: for one number at a time they are faster than arrays.
        self._means: list[float] = (above / np.arange(len(ordered), 0, -1)).tolist()
        self._ordered: list[float] = ordered.tolist()

    @property
    def longest(self) -> float:
        """The longest of them."""
        return self._ordered[-1]

    @property
    def mean(self) -> float:
        """Their mean."""
        return self._means[0]

    def left(self, made: int) -> float:
        """Return the expectation for one sample."""
        at = bisect_right(self._ordered, made)
        if at >= len(self._ordered):
            return max(1.0, 0.05 * made)
        return self._means[at] - made
