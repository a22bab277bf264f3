"""Shards on their way between worker groups, and the votes about them."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray


class ShardBucket(msgspec.Struct, frozen=True):
    """What one rank sends to another in one round. Old rank -> new rank, by the new rank's key."""

    exchange: int
    """which exchange of these channels it belongs to"""
    state: int
    """of which of the states: weights, first moments, ..."""
    round: int
    source: int
    """rank in the plan"""
    data: NDArray[np.uint8]
    """``[bytes]``: runs and seal, see `rlinf_async.backends.reshard.buckets`"""


class ReshardVote(msgspec.Struct, frozen=True):
    """How it went on one rank -> the lowest rank; how it went on all -> every rank."""

    exchange: int
    rank: int
    faults: tuple[str, ...] = ()
    """empty: all is well"""
