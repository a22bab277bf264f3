"""What every process did, in memory that they share: it is there whoever is killed, and whenever.

A record is written before its process does anything else, so a process that died after it took an
item has said so.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

_COUNT: Final = struct.Struct("<Q")
_RECORD: Final = struct.Struct("<BBHI")
RECORDS: Final = 4000
"""Of one process."""


class Did(IntEnum):
    """What a process did with an item."""

    PUTTING = 1
    PUT = 2
    """it is in the channel: its put returned, and was confirmed"""
    TOLD = 3
    """put, or what confirms it, raised: the process was told that it cannot know"""
    GOT = 4
    HELD = 5
    """under a lease"""
    ACKNOWLEDGING = 6
    """the last thing inside the lease's block"""
    ACKNOWLEDGED = 7
    """the block was left without an error"""
    NOT_ACKNOWLEDGED = 8
    """leaving the block raised `LeaseLost`"""


class Record(NamedTuple):
    """A line of the journal."""

    did: Did
    deliveries: int
    item: int


class Page:
    """What one process did. Only that process writes to it."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory = memory
        self._start = start

    @property
    def count(self) -> int:
        found: tuple[int] = _COUNT.unpack_from(self._memory, self._start)
        return found[0]

    def write(self, did: Did, item: int, deliveries: int = 0) -> None:
        count = self.count
        if count >= RECORDS:
            raise RuntimeError(f"a process did more than {RECORDS} things")
        at = self._start + _COUNT.size + count * _RECORD.size
        _RECORD.pack_into(self._memory, at, did, min(deliveries, 255), 0, item)
        _COUNT.pack_into(self._memory, self._start, count + 1)

    def read(self) -> Iterator[Record]:
        for index in range(self.count):
            at = self._start + _COUNT.size + index * _RECORD.size
            did, deliveries, _, item = _RECORD.unpack_from(self._memory, at)
            yield Record(Did(did), deliveries, item)


def journal(pages: int) -> list[Page]:
    """An empty page for each process that will be forked."""
    size = _COUNT.size + RECORDS * _RECORD.size
    memory = mmap.mmap(-1, pages * size)
    return [Page(memory, page * size) for page in range(pages)]
