"""The messages between the ends of a channel and its owner."""

from __future__ import annotations

from typing import Literal

import msgspec

from rlinf_async.channels.encoded import Form
from rlinf_async.channels.ends import Key
from rlinf_async.channels.wire.session.failures import Report

EndKind = Literal["sender", "receiver", "latest_sender", "latest_receiver"]


class Home(msgspec.Struct, frozen=True):
    """A process that the queues of channels live with, beside the one that owns the cluster."""

    name: str
    host: str
    """as of `direct.host_id`"""
    addresses: tuple[str, ...]
    """where it listens: a Unix socket for its own host, TCP for others"""


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
    home: Home | None = None
    """with whom the queue lives, if not with the sender of this; there, the end has to be adopted
    (see `homes`)"""


class Nothing(msgspec.Struct, array_like=True, frozen=True):
    """A reply that says no more than that it was done."""


class RetainedPayload(msgspec.Struct, array_like=True, frozen=True):
    """Large arrays of an item that stay with its producer (see `direct_protocol`)."""

    item: int
    """which one of the items beside it"""
    number: int
    sizes: list[int]


class PayloadRef(msgspec.Struct, array_like=True, frozen=True):
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
    """more will follow: grant me credit for them"""
    retained: RetainedPayload | None = None


class Run(msgspec.Struct, array_like=True, frozen=True):
    """Items that one sender put one after the other."""

    queue: int
    end: int
    key: Key | None
    weight: int
    """of each"""
    count: int


class Transfer(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: items for which credit is spent, in the body. They are confirmed by
    `Grant`."""

    runs: list[Run]
    sizes: list[int]
    """of each item: bytes of MessagePack"""
    retained: list[RetainedPayload] = []


class Credit(msgspec.Struct, array_like=True, frozen=True):
    """Credit for one key of a channel: granted, recalled, or returned unspent."""

    queue: int
    key: Key | None
    items: int = 0
    weight: int | None = None
    """None where the channel does not bound it"""


class Refused(msgspec.Struct, array_like=True, frozen=True):
    """Items of a sender that were in transit when the channel stopped taking items."""

    end: int
    count: int
    error: Report


class Grant(msgspec.Struct, array_like=True, frozen=True):
    """owner -> client: so many items of `Transfer` were handled, some refused; so much credit is
    granted."""

    handled: int
    credits: list[Credit]
    refused: list[Refused]


class Flush(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: answer when all that was sent before is in its place."""


Range = tuple[int, int, int]
"""Entries of a delivery: its number, the index of the first of them, how many."""


class Get(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: deliver items of this weight, under a lease if ``lease``; of weight 0, only
    what can be prefetched now. The number of the request is the delivery's."""

    end: int
    key: Key | None
    weight: int
    at_least: int | None
    party: str
    task: int
    """names the task that asks, within its process"""
    lease: bool = False
    ahead: int = 0
    """so many more items may be prefetched"""
    taken: list[Range] = []
    """as of `Taken`, which this saves"""


class Taken(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: these entries are settled: they were taken."""

    ranges: list[Range]


class Settle(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: these entries are settled, with this `Outcome`; those that are replaced go
    back as the items in the body."""

    ranges: list[Range]
    outcome: int
    error: str = ""
    replaced: list[int] = []
    """of a lease, which is then the only range: indices of its entries"""
    sizes: list[tuple[int, int]] = []
    """of each replacement, as of `Delivered`"""


class Recall(msgspec.Struct, array_like=True, frozen=True):
    """owner -> client: settle what was prefetched for this receiver: another get waits for it."""

    end: int
    key: Key | None


class Delivered(msgspec.Struct, array_like=True, frozen=True):
    """owner -> client: the items of a delivery are in the body: those that were requested, then the
    prefetched ones. Where it is one item, with all its arrays, 1 stands for this; a larger number
    where the body is one MessagePack array of so many items, without arrays beside it."""

    sizes: list[tuple[int, int]]
    """of each item: bytes of MessagePack, number of buffers"""
    deliveries: list[int] = []
    """of a lease: how often each item was handed out"""
    payloads: list[PayloadRef] = []
    """of those whose arrays are not in the body"""


class Clone(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: open another end. The client numbers it, below zero, for itself."""

    end: int
    number: int
    holder: str


class State(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: how full is this key?"""

    end: int
    key: Key | None


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
    """who waits; empty where nobody does, and the value is read ahead"""


class Version(msgspec.Struct, array_like=True, frozen=True):
    """owner -> client: of the value that was published, or that is in the body."""

    version: int
