"""A `WeightUpdate` in memory that the engine's processes map: one copy, no socket, no file left.

::

    8 bytes: length of the header | header: `SharedUpdate`, msgpack | buckets, aligned

The memory is anonymous (``memfd``), and reached by other processes of this user as
``/proc/<pid>/fd/<number>``. It is gone when the last of them has let go, however each one ended.
"""

from __future__ import annotations

import mmap
import os
from types import TracebackType
from typing import Final, Self

import msgspec
import numpy as np

from rlinf_async.messages.weights import TensorSlot, WeightBucket, WeightUpdate

ALIGNMENT: Final = 64
"""bytes; of each bucket"""


class SharedBucket(msgspec.Struct, frozen=True):
    """Where one bucket lies."""

    slots: tuple[TensorSlot, ...]
    start: int
    size: int
    checksum: int


class SharedUpdate(msgspec.Struct, frozen=True):
    """All of an update but the bytes."""

    version: int
    buckets: tuple[SharedBucket, ...]
    checksum: int


class Sharing:
    """Holds an update in shared memory while the block runs.

    ``update`` is the same update, as views of that memory.
    """

    def __init__(self, update: WeightUpdate) -> None:
        places: list[SharedBucket] = []
        end = 0
        for bucket in update.buckets:
            places.append(SharedBucket(bucket.slots, end, len(bucket.data), bucket.checksum))
            end = _aligned(end + len(bucket.data))
        header = msgspec.msgpack.encode(
            SharedUpdate(update.version, tuple(places), update.checksum)
        )
        first = _aligned(8 + len(header))
        self._file = os.memfd_create("rlinf_async weights")
        os.ftruncate(self._file, first + end)
        memory = mmap.mmap(self._file, first + end, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        memory[:8] = len(header).to_bytes(8, "little")
        memory[8 : 8 + len(header)] = header
        whole = np.frombuffer(memory, np.uint8)
        for bucket, place in zip(update.buckets, places, strict=True):
            whole[first + place.start : first + place.start + place.size] = bucket.data
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.update = _update(memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._file)  # the mapping goes with its last view


def open_shared(path: str) -> WeightUpdate:
    """Map what another process shares; the arrays are views, private to whoever writes to them."""
    file = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(file, os.fstat(file).st_size, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)
    return _update(memory)


def _update(memory: mmap.mmap) -> WeightUpdate:
    length = int.from_bytes(memory[:8], "little")
    header = msgspec.msgpack.decode(memory[8 : 8 + length], type=SharedUpdate)
    whole = np.frombuffer(memory, np.uint8)
    first = _aligned(8 + length)
    buckets = tuple(
        WeightBucket(
            place.slots,
            whole[first + place.start : first + place.start + place.size],
            place.checksum,
        )
        for place in header.buckets
    )
    return WeightUpdate(header.version, buckets, header.checksum)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
