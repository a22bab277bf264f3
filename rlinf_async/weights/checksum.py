"""Checksums of buckets: xxh3, 64 bits, at about the speed of memory.

They find accidental damage (a chance of 2^-64 to miss it), not a deliberate change.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from rlinf_async.messages.weights import WeightBucket


def data_checksum(data: NDArray[np.uint8]) -> int:
    """Return xxh3 of these bytes. Other threads may run meanwhile."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(data).data)


def update_checksum(version: int, buckets: Iterable[WeightBucket]) -> int:
    """Return xxh3 over the version, the slots and the checksums of the buckets."""
    headers = [(bucket.slots, bucket.checksum) for bucket in buckets]
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode((version, headers)))
