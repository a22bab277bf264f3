"""What the ends of a channel and its owner say to each other."""

from __future__ import annotations

from typing import Literal

import msgspec

from rlinf_async.channels.encoded import Form
from rlinf_async.channels.ends import Key
from rlinf_async.channels.wire.failures import Report

EndKind = Literal["sender", "receiver", "latest_sender", "latest_receiver"]


class EndRef(msgspec.Struct, frozen=True):
    """The end of a channel on its way to another process, which it stays open for."""

    number: int
    kind: EndKind
    channel: str
    version: int = 0
    """a `LatestReceiver`'s: what it has seen"""
    queue: int = 0
    """the owner's number for the channel, which its other ends share"""
    form: Form = Form()
    """how its items travel"""


class Nothing(msgspec.Struct, array_like=True, frozen=True):
    """A reply that says no more than that it was done."""


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """Large arrays of an item that stay with its producer (see `direct_protocol`)."""

    item: int
    """which one of the items beside it"""
    number: int
    sizes: list[int]


class Left(msgspec.Struct, array_like=True, frozen=True):
    """Large arrays of an item that are with its producer, and how they are got there."""

    item: int
    """which one of the items beside it"""
    number: int
    sizes: list[int]
    token: bytes
    """of the process that keeps them"""
    host: str
    addresses: list[str]


class Put(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: put the body."""

    end: int
    key: Key | None
    weight: int
    party: str
    want: bool = False
    """more will follow: lend me room for them"""
    kept: Kept | None = None


class Run(msgspec.Struct, array_like=True, frozen=True):
    """Items that one sender put one after the other."""

    queue: int
    end: int
    key: Key | None
    weight: int
    """of each"""
    count: int


class Puts(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: items for which room was lent, in the body. They are confirmed by
    `Credit`."""

    runs: list[Run]
    sizes: list[int]
    """of each item: bytes of MessagePack"""
    kept: list[Kept] = []


class Room(msgspec.Struct, array_like=True, frozen=True):
    """Room under one key of a channel: lent, asked back (then it says how much is lent), or given
    back."""

    queue: int
    key: Key | None
    items: int = 0
    weight: int | None = None
    """None where the channel does not bound it"""


class Untaken(msgspec.Struct, array_like=True, frozen=True):
    """Items of a sender that were under way when nobody could take them any more."""

    end: int
    count: int
    error: Report


class Credit(msgspec.Struct, array_like=True, frozen=True):
    """owner -> client: so many items of `Puts` were handled, some refused; so much is lent."""

    handled: int
    rooms: list[Room]
    refused: list[Untaken]


class Flush(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: answer when all that was sent before is in its place."""


class Get(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: take a batch, under a lease if ``lease``."""

    end: int
    key: Key | None
    weight: int
    at_least: int | None
    party: str
    lease: bool = False
    ahead: int | None = None
    """how many more items may come ahead of the next gets; None for a batch or a lease"""
    ranges: list[tuple[int, int]] = []
    answers: list[int] = []
    """as of `Took`, which this saves"""


class More(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: so many items that are there now, ahead of the gets that will take them."""

    end: int
    key: Key | None
    ahead: int
    party: str


class Took(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: these items were taken; these answers have arrived."""

    end: int
    key: Key | None
    ranges: list[tuple[int, int]]
    """first number, how many"""
    answers: list[int]


class Back(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: these items will not be taken, or because of ``error`` cannot be."""

    end: int
    key: Key | None
    ranges: list[tuple[int, int]]
    error: str | None
    lost: bool = False
    """their arrays went with their producer"""


class Wanted(msgspec.Struct, array_like=True, frozen=True):
    """owner -> client: somebody waits for what was sent ahead here."""

    end: int
    key: Key | None


class Taken(msgspec.Struct, array_like=True, frozen=True):
    """owner -> client: the items are in the body. For a single one that a get waits for, and that
    is there with all its arrays, its number alone stands for this."""

    sizes: list[tuple[int, int]]
    """of each item: bytes of MessagePack, number of buffers"""
    lease: int = 0
    deliveries: list[int] = []
    first: int = 0
    """number of the first item, for `Took` and `Back`"""
    left: list[Left] = []
    """of those whose arrays are not in the body"""


class Settle(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: consume the items of a lease, or put them back because of ``error``."""

    lease: int
    error: str | None


class Clone(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: open another end. The client numbers it, below zero, for itself."""

    end: int
    number: int
    holder: str


class End(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: close this end; or count a stale item; or tell the statistics."""

    end: int


class Fail(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: end the channel with an error."""

    end: int
    error: str


class Publish(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: the body is the newest value."""

    end: int
    party: str


class Newer(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: the newest value, once it is newer than this version."""

    end: int
    than: int
    party: str


class Version(msgspec.Struct, array_like=True, frozen=True):
    """owner -> client: of the value that was published, or that is in the body."""

    version: int
