"""A sum tree: numbers are drawn in proportion to their values, in logarithmic time.

Source: Schaul et al. 2016, "Prioritized Experience Replay", appendix B.2.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.embodied import Ints

Values = NDArray[np.float64]


class SumTree:
    """Values of the numbers ``0 .. size - 1``, all 0 at first.

    A parent is the sum of its children, computed anew whenever one of them changes: errors of
    rounding do not add up.
    """

    def __init__(self, size: int) -> None:
        self._leaves = 1 << max(size - 1, 1).bit_length()
        self._nodes = np.zeros(2 * self._leaves)  # node k has the children 2k and 2k + 1

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self._nodes[1])

    def set(self, numbers: Ints, values: Values) -> None:
        """Give these numbers these values; of a number that stands there twice, the last counts."""
        nodes = numbers + self._leaves
        self._nodes[nodes] = values
        while len(nodes) and nodes[0] > 1:
            nodes = np.unique(nodes >> 1)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def get(self, numbers: Ints) -> Values:
        """Return the values of these numbers."""
        found: Values = self._nodes[numbers + self._leaves]
        return found

    def find(self, sums: Values) -> Ints:
        """Return the numbers at these cumulative sums, each at least 0 and below `total`."""
        left = sums.copy()
        nodes = np.ones(len(sums), np.int64)
        while nodes[0] < self._leaves:
            children = 2 * nodes
            values = self._nodes[children]
            # Rounding may leave as much as the whole: then a child without any value is avoided.
            right = (left >= values) & (self._nodes[children + 1] > 0.0)
            left -= np.where(right, values, 0.0)
            nodes = children + right
        return nodes - self._leaves
