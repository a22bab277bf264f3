"""An item in the form in which it travels between processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

Buffer = memoryview | bytearray
PIECE_BYTES: Final = 8 * 1024**2
"""So much is copied at a time: some milliseconds, where the system has to find memory first."""


class Encoded(msgspec.Struct, eq=False, gc=False):
    """MessagePack bytes, and the large arrays that were left out of them.

    A queue carries an item that came from another process in this form until it is taken in this
    process, so an item that is only forwarded is never decoded. Not tracked by the garbage
    collector, which would visit every one that is queued. An item whose payload is still with its
    producer has a `RemotePayload` for buffers.
    """

    data: bytes
    buffers: Sequence[Buffer] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        apart = self.buffers
        return len(self.data) + sum(map(len, apart)) if apart else len(self.data)

    def __repr__(self) -> str:
        return f"<Encoded {self.nbytes} bytes, {len(self.buffers)} arrays apart>"


class Form(msgspec.Struct, array_like=True, frozen=True):
    """How the items of a channel travel. Sent by its owner with each end."""

    members: tuple[str, ...] = ()
    """names of its type, or of the types that it is a union of"""
    numbered: bool = False
    """each item is preceded by the number of its member, which nothing else would tell"""


class LookedAt(list[Any]):
    """Buffers of arrays that are decoded in place: nobody keeps what is made of them."""


EncodeList = Callable[[Iterable[Any], int, int], tuple[int, bytes] | None]
"""Several items as one MessagePack array: see `wire.items.codec.Encoder.encode_list`."""


def copy_of(item: object) -> object:
    """An item whose arrays are its own, if it is still encoded."""
    if isinstance(item, Encoded):
        return Encoded(item.data, [bytearray(buffer) for buffer in item.buffers])
    return item


async def copies_of(items: Sequence[object]) -> list[object]:
    """`copy_of` each of these. Others in this loop have a turn after each `PIECE_BYTES`."""
    encoded = [item for item in items if isinstance(item, Encoded)]
    copied = iter(await copy_buffers([buffer for item in encoded for buffer in item.buffers]))
    return [
        Encoded(item.data, [next(copied) for _ in item.buffers])
        if isinstance(item, Encoded)
        else item
        for item in items
    ]


async def copy_buffers(buffers: Iterable[Buffer | bytes]) -> list[bytearray]:
    """A copy of each of these. Others in this loop have a turn after each `PIECE_BYTES`; the
    buffers must not change meanwhile."""
    copies: list[bytearray] = []
    copied = 0
    for buffer in buffers:
        copies.append(grown := bytearray())
        for start in range(0, len(buffer), PIECE_BYTES):  # to grow takes no time, to clear would
            piece = memoryview(buffer)[start : start + PIECE_BYTES]
            grown += piece
            copied += len(piece)
            if copied >= PIECE_BYTES:
                copied = 0
                await asyncio.sleep(0)
    return copies
