"""An item in the form in which it travels between processes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

Buffer = memoryview | bytearray


class Encoded(msgspec.Struct, eq=False, gc=False):
    """MessagePack bytes, and the large arrays that were left out of them.

    A queue carries an item that came from another process in this form until somebody here takes
    it, so an item that is only forwarded is never decoded. Not tracked by the garbage collector,
    which would visit every one that is queued. Arrays that are still with their producer have an
    `Away` in their place.
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
    """How the items of a channel travel: what its owner tells whoever gets an end of it."""

    members: tuple[str, ...] = ()
    """names of its type, or of the types that it is a union of"""
    numbered: bool = False
    """each item is preceded by the number of its member, which nothing else would tell"""


def copy_of(item: object) -> object:
    """An item whose arrays are its own, if it is still encoded."""
    if isinstance(item, Encoded):
        return Encoded(item.data, [bytearray(buffer) for buffer in item.buffers])
    return item
