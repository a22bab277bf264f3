"""One bucket: the runs that one rank sends to another in one round, packed, and sealed by a
checksum.

::

    run, run, ...        each from a multiple of ALIGNMENT bytes on, row-major
    seal                 int64 checksum of all bytes before it, int64 round

Sender and receiver have the same runs in the same order, so there is no header. Bytes on the CPU
are copied and hashed a block at a time, while the block is in the cache: xxh3 (64 bits) misses a
change by chance once in 2^64, whatever changed; it does not protect against deliberate changes.
On other devices the checksum is a sum of the words by their place, taken once the bucket is whole:
it always detects one changed word, and words in another order nearly always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from rlinf_async.parallel import BufferRun, BufferView

SUMMED_WORDS = 1 << 16
"""words that are summed at a time, on other devices than the CPU"""


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
    odd = 2 * torch.arange(SUMMED_WORDS, dtype=torch.int64, device=data.device) + 1
    total = odd.new_zeros(())
    for block, words in enumerate(torch.split(data.view(torch.int64), SUMMED_WORDS)):
        total += (words * (odd[: len(words)] + 2 * SUMMED_WORDS * block)).sum()
    return total


ALIGNMENT = 16
"""bytes; the largest element has as many"""
SEAL = 16
"""bytes of the checksum that seals a bucket"""
BLOCK = 1 << 19
"""bytes that are copied and hashed at a time"""

DtypeOf = Callable[[BufferRun], torch.dtype]
"""dtype of a run in the bucket: that of the receiver's buffer"""
Copy = Callable[[], object]


def bucket_bytes(runs: Sequence[BufferRun], dtype_of: DtypeOf) -> int:
    """Return the size of a bucket with these runs."""
    return sum(_padded(run, dtype_of(run)) for run in runs) + SEAL


def pack(
    bucket: Tensor, runs: Sequence[BufferRun], buffers: Mapping[str, Tensor], dtype_of: DtypeOf
) -> int:
    """Copy the runs into a bucket ``[bytes]`` of their size; return its checksum for `seal`."""
    digest = Digest(bucket[:-SEAL])
    for run, place, first in _places(bucket, runs, dtype_of):
        source = window(buffers[run.source.buffer], run.source)
        for end, copy in _copied(source, place, first, into_bucket=True):
            copy()
            digest.reach(end)
    return digest.value()


def seal(bucket: Tensor, checksum: int, now: int) -> None:
    """Write checksum and round behind the runs."""
    end = bucket[-SEAL:].view(torch.int64)
    end[0] = checksum
    end[1] = now


def unpack(
    bucket: Tensor,
    runs: Sequence[BufferRun],
    buffers: Mapping[str, Tensor],
    dtype_of: DtypeOf,
    now: int,
) -> bool:
    """Copy the runs out of a bucket into their target buffers.

    Return whether the bytes are those that were sealed, in this round; else the content of the
    target buffers must not be used.
    """
    digest = Digest(bucket[:-SEAL])
    for run, place, first in _places(bucket, runs, dtype_of):
        target = window(buffers[run.target.buffer], run.target)
        for end, copy in _copied(target, place, first, into_bucket=False):
            digest.reach(end)
            copy()
    found, sent_in = bucket[-SEAL:].view(torch.int64).tolist()
    return bool(sent_in == now and found == digest.value())


def window(buffer: Tensor, where: BufferView) -> Tensor:
    """Return the elements of a contiguous buffer that a view names, without a copy."""
    base = buffer.storage_offset()
    return torch.as_strided(buffer.detach(), where.size, where.stride, base + where.offset)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.device == other.device
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def copy(target: Tensor, source: Tensor) -> None:
    """Copy elements into others of the same shape."""
    alike = target.dtype == source.dtype and target.device == source.device
    if alike and target.device.type == "cpu" and target.is_contiguous() and source.is_contiguous():
        # The C library's copy: past the caches where it is long, which torch's is not.
        np.copyto(_as_bytes(target), _as_bytes(source))
    else:
        target.copy_(source)


def _as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


def _copied(
    held: Tensor, place: Tensor, first: int, into_bucket: bool
) -> Iterator[tuple[int, Copy]]:
    """Cut a run and its place in a bucket, which begins at byte ``first``, into blocks.

    Yields the byte of the bucket at which a block ends, and a function that copies it.
    """
    size = place.numel() * place.element_size()
    source, target = (held, place) if into_bucket else (place, held)
    if place.device.type != "cpu" or size <= BLOCK:
        yield first + size, partial(target.copy_, source)
    elif held.dtype == place.dtype and held.is_contiguous():
        # As bytes of numpy: a torch call for each block costs a third of what the block does.
        one, other = _as_bytes(source), _as_bytes(target)
        for low in range(0, size, BLOCK):
            high = min(low + BLOCK, size)
            yield first + high, partial(np.copyto, other[low:high], one[low:high])
    else:
        row = size // len(place)
        for low in range(0, len(place), step := max(1, BLOCK // row)):
            high = min(low + step, len(place))
            yield first + high * row, partial(target[low:high].copy_, source[low:high])


def _places(
    bucket: Tensor, runs: Sequence[BufferRun], dtype_of: DtypeOf
) -> Iterator[tuple[BufferRun, Tensor, int]]:
    """Yield each run, its place in the bucket, and the byte at which the place begins."""
    at = 0
    for run in runs:
        dtype = dtype_of(run)
        place = bucket[at : at + run.elements * dtype.itemsize].view(dtype)
        yield run, place.view(run.source.size), at
        at += _padded(run, dtype)


def _padded(run: BufferRun, dtype: torch.dtype) -> int:
    return -(-run.elements * dtype.itemsize // ALIGNMENT) * ALIGNMENT
