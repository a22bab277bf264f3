"""Notices about shared memory between two processes. See `shared_memory`."""

from __future__ import annotations

import msgspec


class Announce(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """lender -> borrower: open this slab."""

    slab: int
    """number of the slab in the lender's process"""
    file: int
    """file descriptor in the lender's process"""
    token: bytes
    """content of the slab's first page"""


class Opened(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """borrower -> lender: the slab is open, and messages may refer to it."""

    slab: int


class Refused(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """borrower -> lender: the slab cannot be opened."""

    slab: int
    reason: str


class Released(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """borrower -> lender: these loans have ended."""

    loans: list[int]
    """loans whose memory is not used any more"""
    poisoned: list[int]
    """loans whose memory a process out of reach may still use"""


class Retired(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """lender -> borrower: no message will refer to the slab any more."""

    slab: int


class Place(msgspec.Struct, array_like=True, frozen=True):
    """The place of an array of a message. A loan may hold several arrays."""

    loan: int
    slab: int
    offset: int
    """bytes from the start of the slab"""
    size: int
    """in bytes"""


Notice = Announce | Opened | Refused | Released | Retired

encode = msgspec.msgpack.Encoder().encode
decode_notice = msgspec.msgpack.Decoder(Notice).decode
decode_places = msgspec.msgpack.Decoder(list[Place | None]).decode
