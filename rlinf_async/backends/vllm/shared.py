"""Passing a `WeightUpdate` to the engine's processes through shared memory.

Buckets that arrived in shared memory stay where they are, and the engine gets their place. The
others are copied into anonymous memory (``memfd``), which other processes of this user open as
``/proc/<pid>/fd/<number>``; it is released when the last process has closed it, however each one
ended.
"""

from __future__ import annotations

import mmap
import os
from types import TracebackType
from typing import Final, Self, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.weights import TensorSlot, WeightBucket, WeightUpdate
from rlinf_async.weights.memory_files import FilePlace, places_of

ALIGNMENT: Final = 64
"""bytes; of each bucket"""

Known: TypeAlias = dict[tuple[TensorSlot, ...], int]
"""checksums, by their slots, of the buckets that an engine has loaded"""


class SharedBucket(msgspec.Struct, frozen=True):
    """Place of one bucket."""

    slots: tuple[TensorSlot, ...]
    path: str
    start: int
    size: int
    checksum: int
    unchanged: bool
    """the engine has loaded these bytes already"""


class SharedUpdate(msgspec.Struct, frozen=True):
    """An update without its bytes."""

    version: int
    buckets: tuple[SharedBucket, ...]
    checksum: int


class UpdateSharing:
    """Keeps an update in shared memory while the block runs.

    ``header`` says where it is; ``update`` is the same update, as views of that memory.

    Args:
        update: weights as they arrived.
        known: buckets that the engine has loaded.
    """

    def __init__(
        self,
        update: WeightUpdate,
        known: Known | None = None,
    ) -> None:
        self._file: int | None = None
        known = known or {}
        self.unchanged = frozenset(
            index
            for index, bucket in enumerate(update.buckets)
            if known.get(bucket.slots) == bucket.checksum
        )
        """buckets that the engine has loaded already"""
        places = places_of([bucket.data for bucket in update.buckets])
        buckets = list(update.buckets)
        apart = [
            index
            for index, place in enumerate(places)
            if place is None and len(buckets[index].data)
        ]
        for index, place, data in self._copy(apart, buckets):
            places[index] = place
            buckets[index] = msgspec.structs.replace(buckets[index], data=data)
        self.update = msgspec.structs.replace(update, buckets=tuple(buckets))
        where = [
            SharedBucket(
                bucket.slots, *(place or ("", 0)), len(bucket.data), bucket.checksum,
                index in self.unchanged,
            )
            for index, (bucket, place) in enumerate(zip(buckets, places, strict=True))
        ]  # fmt: skip
        self.header = msgspec.msgpack.encode(
            SharedUpdate(update.version, tuple(where), update.checksum)
        )

    def _copy(
        self, apart: list[int], buckets: list[WeightBucket]
    ) -> list[tuple[int, FilePlace, NDArray[np.uint8]]]:
        """Copy these buckets into shared memory."""
        if not apart:
            return []
        starts, end = [], 0
        for index in apart:
            starts.append(end)
            end += -(-len(buckets[index].data) // ALIGNMENT) * ALIGNMENT
        self._file = os.memfd_create("rlinf_async weights")
        os.ftruncate(self._file, end)
        memory = mmap.mmap(self._file, end, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        whole, path = np.frombuffer(memory, np.uint8), f"/proc/{os.getpid()}/fd/{self._file}"
        made = []
        for index, start in zip(apart, starts, strict=True):
            data = whole[start : start + len(buckets[index].data)]
            data[:] = buckets[index].data
            made.append((index, FilePlace(path, start), data))
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            os.close(self._file)  # the mapping goes with its last view


class Memory:
    """Memory of other processes, mapped while the last update lies in it."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[str, int], mmap.mmap] = {}

    def open(self, header: bytes) -> tuple[WeightUpdate, frozenset[str]]:
        """Map an update of another process; the arrays are views, copied on write.

        Returns the update, and the names of the tensors that were loaded already.

        Raises:
            OSError: the memory is gone, with the process that held it.
        """
        shared = msgspec.msgpack.decode(header, type=SharedUpdate)
        seen: dict[tuple[str, int], mmap.mmap] = {}
        buckets, loaded = [], set[str]()
        for bucket in shared.buckets:
            data = np.empty(0, np.uint8)
            if bucket.size:
                memory = self._map(bucket.path, seen)
                data = np.frombuffer(memory, np.uint8, bucket.size, bucket.start)
            if bucket.unchanged:
                loaded.update(slot.name for slot in bucket.slots)
            buckets.append(WeightBucket(bucket.slots, data, bucket.checksum))
        self._mapped = seen
        return WeightUpdate(shared.version, tuple(buckets), shared.checksum), frozenset(loaded)

    def _map(self, path: str, seen: dict[tuple[str, int], mmap.mmap]) -> mmap.mmap:
        file = os.open(path, os.O_RDWR)
        try:
            status = os.fstat(file)
            key = path, status.st_ino  # the number may be another file's by now
            memory = seen.get(key) or self._mapped.get(key)
            if memory is None:
                memory = mmap.mmap(file, status.st_size, access=mmap.ACCESS_COPY)
        finally:
            os.close(file)
        seen[key] = memory
        return memory
