"""Checksum of a bucket, computed while its bytes are copied.

::

    CPU       xxh3 of the bytes, each block while it is in the cache; faster than a copy
    others    a sum of the words by place, on the device, once the bucket is whole

xxh3 (64 bits) misses a change by chance once in 2^64, whatever changed: flipped bits, blocks in
another order, old bytes. It does not protect against deliberate changes. The sum always detects one
changed word, and words in another order nearly always.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

WIDTH = 512
"""words of a row of the sum's table"""


class Digest:
    """The digest of a bucket's payload ``[bytes]`` (a multiple of 8) that is read, or written, in
    order."""

    def __init__(self, payload: Tensor) -> None:
        self._payload = payload
        self._state = xxhash.xxh3_64() if payload.device.type == "cpu" else None
        self._bytes = payload.numpy().data if self._state else None
        self._done = 0

    def reach(self, end: int) -> None:
        """Add the bytes up to ``end``, which must not change any more."""
        if self._state is not None and self._bytes is not None and end > self._done:
            self._state.update(self._bytes[self._done : end])
            self._done = end

    def value(self) -> int:
        """Return the digest of the whole payload, as a signed 64-bit number."""
        if self._state is None:
            return int(sum_by_place(self._payload).item())
        self.reach(len(self._payload))
        number = self._state.intdigest()
        return number - (1 << 64) if number >> 63 else number


def sum_by_place(data: Tensor) -> Tensor:
    """Return the sum of the words of ``[bytes]``, each by an odd weight that depends on its place.

    An int64 scalar on their device.
    """
    words = data.view(torch.int64)
    whole = len(words) // WIDTH * WIDTH
    table, rest = words[:whole].view(-1, WIDTH), words[whole:]
    columns, rows = table.sum(0), table.sum(1)
    total = rows.sum() + (columns * _even(WIDTH, 2, words)).sum()
    total += (rows * _even(len(rows), 1028, words)).sum()
    return total + (rest * (_even(len(rest), 6, words) + 1)).sum()


def _even(count: int, step: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=like.device) * step
