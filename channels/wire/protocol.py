"""The messages between the ends of a channel and its owner, as msgspec Structs.

Those about payloads, large arrays that go from producer to consumer, past the owner::

    producer                         owner                            consumer
      OFFER token, addresses ------>
      PUTS in-band part, Retained ----->  queue  <------------------------ GET
                                        in-band part, PayloadRef ---------->
      <------------------------------------------------------- FETCH number
      arrays ------------------------------------------------------->
      <-- RELEASE number ----------  <------------------------ taken, or the lease acknowledged

A consumer that does not reach the producer asks the owner (PASS), which fetches them over the
connection that it has, and passes them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from rlinf_async.channels.encoded import Encoded, Form
from rlinf_async.channels.ends import Key
from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.statistics import Statistics, Wait
from rlinf_async.channels.wire.frames import MAX_MESSAGE_BYTES
from rlinf_async.channels.wire.session.requests import Report

EndKind = Literal["sender", "receiver", "latest_sender", "latest_receiver"]


class Home(msgspec.Struct, frozen=True):
    """A process that the queues of channels live with, beside the one that owns the cluster."""

    name: str
    host: str
    """host of the process, as `direct.host_id` names it"""
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
    """home of the queue, if it is not the sender of this; there, the end has to be adopted (see
    `homes`)"""


class Nothing(msgspec.Struct, array_like=True, frozen=True):
    """A reply that says no more than that it was done."""


class RetainedPayload(msgspec.Struct, array_like=True, frozen=True):
    """Large arrays of an item that stay with its producer (see `direct_protocol`)."""

    item: int
    """index of the item in the message"""
    number: int
    sizes: list[int]


class PayloadRef(msgspec.Struct, array_like=True, frozen=True):
    """Large arrays of an item that are with its producer, and how they are got there."""

    item: int
    """index of the item in the message"""
    number: int
    sizes: list[int]
    token: bytes
    """token of the process that keeps the arrays"""
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
    """weight of each item"""
    count: int


class Transfer(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: items for which credit is spent, in the body. They are confirmed by
    `Grant`."""

    runs: list[Run]
    sizes: list[int]
    """bytes of MessagePack of each item"""
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
"""entries of a delivery: its number, the index of the first entry, and their number"""


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
    """number of further items that may be prefetched"""
    taken: list[Range] = []
    """entries that were taken, as in `Taken`, whose message this saves"""
    confirmed: bool = True
    """of a lease: whether its holder waits for the word that it is settled. One that does not may
    have used the items when it is lost"""


class Taken(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: these entries are settled: they were taken."""

    taken: list[Range]


class Settle(msgspec.Struct, array_like=True, frozen=True):
    """client -> owner: these entries are settled, with this `Outcome`; those that are replaced go
    back as the items in the body."""

    ranges: list[Range]
    outcome: int
    error: str = ""
    replaced: list[int] = []
    """indices of the entries of a lease that are replaced; it is then the only range"""
    sizes: list[tuple[int, int]] = []
    """bytes of MessagePack and number of buffers of each replacement"""


class Recall(msgspec.Struct, array_like=True, frozen=True):
    """owner -> client: settle what was prefetched for this receiver: another get waits for it."""

    end: int
    key: Key | None


class Delivered(msgspec.Struct, array_like=True, frozen=True):
    """owner -> client: the items of a delivery are in the body: those that were requested, then the
    prefetched ones. Where it is one item, with all its arrays, 1 stands for this; a larger number
    where the body is one MessagePack array of so many items, without arrays beside it."""

    sizes: list[tuple[int, int]]
    """bytes of MessagePack and number of buffers of each item"""
    deliveries: list[int] = []
    """number of times that each item of a lease was handed out"""
    payloads: list[PayloadRef] = []
    """payloads of the items whose arrays are not in the body"""


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


TOKEN_BYTES: Final = 16
MAX_ADDRESSES: Final = 4
MAX_ARRAYS: Final = 128
"""most arrays of one item: their sizes stand in the heads of messages, which are bounded"""
MAX_ADDRESS: Final = 300
"""Characters."""


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """producer -> owner: payloads will stay here, to be fetched at these addresses."""

    token: bytes
    """random; known only to the owner and to consumers of its items"""
    host: str
    """names its host; the Unix sockets among the addresses are of use there"""
    addresses: list[str]


class Fetch(msgspec.Struct, array_like=True, frozen=True):
    """consumer or owner -> producer, or consumer -> owner ("pass"): give me these arrays."""

    token: bytes
    number: int


class Payload(msgspec.Struct, array_like=True, frozen=True):
    """The answer to `Fetch`: the arrays are in the body, unless they are not there any more."""

    here: bool


class Release(msgspec.Struct, array_like=True, frozen=True):
    """owner -> producer: these payloads will not be fetched any more."""

    numbers: list[int]


class PutAbandoned(msgspec.Struct, array_like=True, frozen=True):
    """producer -> owner: a put was given up; release its payload if the item did not arrive."""

    number: int


class TakeOver(msgspec.Struct, array_like=True, frozen=True):
    """producer -> owner: this process closes: load all payloads that it still retains."""


def check_offer(offer: Offer) -> None:
    """Refuse one that is too large to be kept.

    Raises:
        MalformedFrame: it is.
    """
    if (
        len(offer.token) != TOKEN_BYTES
        or len(offer.addresses) > MAX_ADDRESSES
        or any(len(text) > MAX_ADDRESS for text in (*offer.addresses, offer.host))
    ):
        raise MalformedFrame("an invalid offer of payloads")


def check_payload(sizes: Sequence[int]) -> None:
    """Refuse arrays that no message could carry.

    Raises:
        MalformedFrame: they are too many, or too large.
    """
    if not 1 <= len(sizes) <= MAX_ARRAYS or min(sizes) < 0 or sum(sizes) > MAX_MESSAGE_BYTES:
        raise MalformedFrame(f"{len(sizes)} arrays of {sum(sizes)} bytes stay with their producer")


def fits(body: Encoded | None, sizes: Sequence[int]) -> bool:
    """Whether these are the arrays that were announced."""
    return body is not None and not body.data and [*map(len, body.buffers)] == [*sizes]


class Create(msgspec.Struct, array_like=True, frozen=True):
    """maker -> home: make a queue. Its items are known to those who put and take them."""

    name: str
    capacity: int
    max_weight: int | None
    max_deliveries: int
    form: Form


class Created(msgspec.Struct, array_like=True, frozen=True):
    """The answer."""

    queue: int


class Open(msgspec.Struct, array_like=True, frozen=True):
    """maker -> home: open an end, which I call ``number``."""

    queue: int
    kind: EndKind
    number: int
    holder: str


class Adopt(msgspec.Struct, array_like=True, frozen=True):
    """user -> home: I use the end that the maker calls ``number``."""

    queue: int
    number: int


class Adopted(msgspec.Struct, array_like=True, frozen=True):
    """The answer: what to call it."""

    end: int


class ChannelEnded(msgspec.Struct, array_like=True, frozen=True):
    """maker -> home: the channel ends, with this error if there is one."""

    queue: int
    error: str | None = None


class Look(msgspec.Struct, array_like=True, frozen=True):
    """maker -> home: what is seen of the queues that I have made?"""


class HomedKey(msgspec.Struct, array_like=True, frozen=True):
    """maker -> home: how full is this key of the queue? The answer is a `KeyState`."""

    queue: int
    key: Key | None = None


class ChannelSeen(msgspec.Struct, frozen=True):
    """What is seen of one of the maker's queues."""

    queue: int
    statistics: Statistics
    waits: list[Wait]
    dead_letter: str = ""
    """why the last one was given up"""


class Seen(msgspec.Struct, frozen=True):
    """The answer."""

    channels: list[ChannelSeen]


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


class NotOpened(msgspec.Struct, array_like=True, tag=2, frozen=True):
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
    """size in bytes"""


Notice = Announce | Opened | NotOpened | Released | Retired

encode = msgspec.msgpack.Encoder().encode
decode_notice = msgspec.msgpack.Decoder(Notice).decode
decode_places = msgspec.msgpack.Decoder(list[Place | None]).decode
