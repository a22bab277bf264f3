"""Shards that worker groups exchange, and the votes about them."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray


class ShardBucket(msgspec.Struct, frozen=True):
    """What one rank sends to another in one round. Old rank -> new rank, by the new rank's key."""

    exchange: int
    """number of the exchange on these channels"""
    state: int
    """number of the state: weights, first moments, ..."""
    round: int
    source: int
    """rank in the plan"""
    data: NDArray[np.uint8]
    """``[bytes]``: runs and seal, see `rlinf_async.backends.reshard.buckets`"""


class ReshardVote(msgspec.Struct, frozen=True):
    """The result on one rank -> the lowest rank; the results of all -> every rank."""

    exchange: int
    rank: int
    faults: tuple[str, ...] = ()
    """errors; empty where there are none"""
