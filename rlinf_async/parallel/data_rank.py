"""Which samples a rank trains on: several ranks may hold parts of one model, for the same ones."""

from __future__ import annotations

from typing import NamedTuple


class DataRank(NamedTuple):
    """Where a rank stands among those that train on other samples.

    ::

        tp=2, dp=2      launched rank   0   1   2   3
                        data rank       0   0   1   1
                        reads, writes   x       x       the others get batches from it
    """

    rank: int
    """of the samples: the key under which they arrive"""
    size: int
    """number of data ranks, which share a global batch"""
    is_io: bool = True
    """reads and writes channels for the ranks that have the same data rank"""
