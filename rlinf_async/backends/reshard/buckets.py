"""One bucket: the runs that one rank sends to another in one round, packed, and sealed by a
checksum.

::

    run, run, ...        each from a multiple of ALIGNMENT bytes on, row-major
    seal                 int64 checksum of all words before it, int64 round

Sender and receiver have the same runs in the same order, so nothing else need be said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rlinf_async.parallel import Run, View

ALIGNMENT = 16
"""bytes; the largest element has as many"""
SEAL = 16
"""bytes"""
WIDTH = 512
"""words of a row of the checksum's table"""
BLOCK = 1 << 17
"""words (1 MiB) that are summed at a time"""

DtypeOf = Callable[[Run], torch.dtype]
"""in which dtype a run travels: that of the receiver's buffer"""


def bucket_bytes(runs: Sequence[Run], dtype_of: DtypeOf) -> int:
    """Return the size of a bucket with these runs."""
    return sum(_padded(run, dtype_of(run)) for run in runs) + SEAL


def pack(
    bucket: Tensor, runs: Sequence[Run], buffers: Mapping[str, Tensor], dtype_of: DtypeOf
) -> None:
    """Copy the runs into a bucket ``[bytes]`` of their size; it is not sealed yet."""
    for run, room in _rooms(bucket, runs, dtype_of):
        room.copy_(window(buffers[run.source.buffer], run.source))


def seal(bucket: Tensor, now: int) -> None:
    """Write checksum and round behind the runs."""
    end = bucket[-SEAL:].view(torch.int64)
    end[0] = checksum(bucket[:-SEAL])
    end[1] = now


def is_sound(bucket: Tensor, now: int) -> bool:
    """Return whether the bytes are those that were sealed, in this round."""
    found, sent_in = bucket[-SEAL:].view(torch.int64).tolist()
    return bool(sent_in == now and checksum(bucket[:-SEAL]).item() == found)


def unpack(
    bucket: Tensor, runs: Sequence[Run], buffers: Mapping[str, Tensor], dtype_of: DtypeOf
) -> None:
    """Copy the runs out of a bucket into their target buffers."""
    for run, room in _rooms(bucket, runs, dtype_of):
        window(buffers[run.target.buffer], run.target).copy_(room)


def window(buffer: Tensor, where: View) -> Tensor:
    """Return the elements of a contiguous buffer that a view names, without a copy."""
    base = buffer.storage_offset()
    return torch.as_strided(buffer.detach(), where.size, where.stride, base + where.offset)


def checksum(data: Tensor) -> Tensor:
    """Return a 64-bit checksum of ``[bytes]`` (a multiple of 8), as an int64 scalar on its device.

    A sum of words with odd weights that depend on the word's place: one changed word always
    shows, words in another order nearly always.
    """
    words = data.view(torch.int64)
    if data.device.type != "cpu":
        return _of_block(words)
    # Blocks that stay in the cache between the two passes: twice as fast.
    blocks = torch.split(words, BLOCK)
    sums = torch.stack([_of_block(block) for block in blocks]) if blocks else words[:0]
    return (sums * (_even(len(sums), 2062, data) + 1)).sum()


def _of_block(words: Tensor) -> Tensor:
    whole = len(words) // WIDTH * WIDTH
    table, rest = words[:whole].view(-1, WIDTH), words[whole:]
    columns, rows = table.sum(0), table.sum(1)
    total = rows.sum() + (columns * _even(WIDTH, 2, words)).sum()
    total += (rows * _even(len(rows), 1028, words)).sum()
    return total + (rest * (_even(len(rest), 6, words) + 1)).sum()


def _even(count: int, step: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=like.device) * step


def _rooms(bucket: Tensor, runs: Sequence[Run], dtype_of: DtypeOf) -> list[tuple[Run, Tensor]]:
    rooms: list[tuple[Run, Tensor]] = []
    at = 0
    for run in runs:
        dtype = dtype_of(run)
        room = bucket[at : at + run.elements * dtype.itemsize].view(dtype)
        rooms.append((run, room.view(run.source.size)))
        at += _padded(run, dtype)
    return rooms


def _padded(run: Run, dtype: torch.dtype) -> int:
    return -(-run.elements * dtype.itemsize // ALIGNMENT) * ALIGNMENT
