"""The items of one message that were put on credit, found again in its body. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.links.protocol import Run, Transfer
from rlinf_async.channels.wire.memory.slab import is_private

FAR_ARRAYS_BYTES: Final = 8 * 1024**2
"""Of the arrays of one item that is put without asking, where they are not in shared memory."""


def cut(transfer: Transfer, body: Encoded) -> list[tuple[Run, list[Encoded], int]]:
    """Each run with its items, and the bytes of MessagePack that these take.

    Raises:
        MalformedFrame: they do not fit the body, or are not as such items may be.
    """
    data, arrays, sizes = body.data, body.buffers, transfer.sizes
    if sizes == [len(data)] and len(transfer.runs) == 1 and not arrays:
        run = transfer.runs[0]
        if run.count == 1 and run.weight >= 1:
            return [(run, [body], len(data))]  # one item, which most messages have
    count = 0
    for run in transfer.runs:
        if run.count < 0 or run.weight < 1:
            raise MalformedFrame("items came in negative numbers or weights")
        count += run.count
    if sum(sizes) != len(data) or count != len(sizes):
        raise MalformedFrame(f"{len(sizes)} items of {sum(sizes)} bytes came in {len(data)}")
    if sizes and min(sizes) < 0:
        raise MalformedFrame("items came in negative sizes")
    if arrays:
        _check_arrays(count, arrays)
    found: list[tuple[Run, list[Encoded], int]] = []
    index = start = 0
    for run in transfer.runs:
        items: list[Encoded] = []
        first = start
        for size in sizes[index : index + run.count]:
            stop = start + size
            items.append(Encoded(data[start:stop], arrays))
            start = stop
        index += run.count
        found.append((run, items, start - first))
    return found


def _check_arrays(items: int, arrays: Sequence[memoryview | bytearray]) -> None:
    """Credit is room in a channel, and not any amount of this process's memory."""
    beside = sum(len(one) for one in arrays if not is_private(one))
    if items != 1 or beside > FAR_ARRAYS_BYTES:
        raise MalformedFrame(
            f"{items} items with arrays came unasked, {beside} bytes of them not in shared memory"
        )
