"""What two processes say to each other about shared memory. See `shared_memory`."""

from __future__ import annotations

import msgspec


class Announce(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """lender -> borrower: open this."""

    slab: int
    file: int
    token: bytes


class Opened(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """borrower -> lender: parts of it may be mentioned."""

    slab: int


class Refused(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """borrower -> lender: it cannot be used here."""

    slab: int
    reason: str


class Released(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """borrower -> lender: these parts are not used any more; the poisoned ones may still be."""

    loans: list[int]
    poisoned: list[int]


class Retired(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """lender -> borrower: it will not be mentioned again."""

    slab: int


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Where an array of a message lies. A loan may hold several."""

    loan: int
    slab: int
    offset: int
    size: int


Notice = Announce | Opened | Refused | Released | Retired

encode = msgspec.msgpack.Encoder().encode
decode_notice = msgspec.msgpack.Decoder(Notice).decode
decode_places = msgspec.msgpack.Decoder(list[Place | None]).decode
