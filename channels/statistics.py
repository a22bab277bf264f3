"""What a channel has seen so far: its counts, and what went over each of its edges.

An edge leads from a producer in another process into the channel, or from it to such a consumer.
Edges are counted where items arrive or leave, in structs that are there already: nothing is
allocated for an item. What is handed over inside the owner's process has no edge: it is what is
left of ``puts`` and ``gets``.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from rlinf_async.channels.encoded import Encoded

MAX_EDGES: Final = 1024
"""Edges of one channel that are told apart, in each direction; the others share the last."""
OTHER_PARTIES: Final = "others"


class Edge(msgspec.Struct, kw_only=True):
    """What went between a channel and the calls of one name in other processes."""

    end: Literal["sender", "receiver"]
    party: str
    """who put or took it, as in ``Actor[0].train``"""
    items: int = 0
    nbytes: int = 0
    """encoded, arrays included"""
    shared: int = 0
    """items put whose large arrays came by shared memory, without a copy"""
    copied: int = 0
    """items put whose large arrays came through the socket"""
    direct: int = 0
    """items whose large arrays did not come to the channel's owner, or did not leave from there"""
    credit_waits: int = 0
    """puts that had to ask, because the credit was spent"""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """One channel's counts since its first end was opened.

    Timeouts are in seconds of the event loop's clock.
    """

    name: str
    capacity: int
    """items that each key may hold before ``put`` waits"""
    depth: int
    """items queued now, over all keys, without those that were `collected`"""
    weight: int
    """their weight"""
    collected: int = 0
    """items that a batch which still waits for more has collected so far: they take up no room"""
    keys: int
    """keys under which something is queued or waited for; ``capacity`` holds for each"""
    puts: int
    gets: int
    put_waits: int
    """puts that found the channel full"""
    put_wait_seconds: float
    get_waits: int
    """gets that found nothing"""
    get_wait_seconds: float
    waiting_putters: int
    waiting_getters: int
    leases_out: int
    """items taken by lease and neither acknowledged nor returned"""
    redelivered: int
    """items that a failed or cancelled lease has put back"""
    unconfirmed: int = 0
    """items that went back because the process they were sent to was lost before it confirmed them:
    it may have seen them, so that they are seen twice"""
    dead_letters: int
    """items given up after ``max_deliveries``"""
    stale: int
    """items that came back as `TooStale`"""
    shared: int = 0
    """items of other processes whose large arrays came by shared memory, without a copy"""
    copied: int = 0
    """items of other processes whose large arrays came through a socket"""
    prefetched: int = 0
    """of the items queued, those that were sent to a receiver ahead of its next gets"""
    credit: int = 0
    """items that other processes may put without asking"""
    credit_waits: int = 0
    """puts of other processes that had to ask, because their credit was spent"""
    refused: int = 0
    """items that were under way when the channel closed, failed, or lost its last receiver"""
    direct: int = 0
    """items of other processes whose large arrays stayed there, until a consumer fetches them"""
    loaded: int = 0
    """of those, the ones that came through this process after all: for a receiver here, or one that
    cannot reach the producer, or because the producer ended"""
    lost: int = 0
    """of those, the ones that are lost: the producer died before they were fetched"""
    edges: tuple[Edge, ...] = ()
    """what went to and from other processes, by who put or took it"""
    senders: int
    receivers: int
    seconds: float
    """since the first end was opened"""

    @property
    def rate(self) -> float:
        """Items taken per second, over the channel's whole life."""
        return self.gets / self.seconds if self.seconds > 0 else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the items that came from other processes."""
        return sum(edge.nbytes for edge in self.edges if edge.end == "sender")


class KeyState(msgspec.Struct, frozen=True, kw_only=True):
    """How full one key of a channel is now."""

    depth: int
    """items queued, without those that were `collected`"""
    weight: int
    """their weight"""
    collected: int
    """items that a batch which still waits for more has collected so far: they take up no room"""
    unsettled: int = 0
    """deliveries that are not settled: of items that are leased, or on their way to a process"""
    room: int
    """items that could be put now; credit that other processes hold is not counted as room"""
    room_weight: int | None
    """their weight; None where the channel does not bound it"""

    @property
    def empty(self) -> bool:
        """Whether nothing is queued."""
        return self.depth == 0

    @property
    def full(self) -> bool:
        """Whether the next put would have to wait."""
        return self.room == 0 or self.room_weight == 0


class DeadLetter(msgspec.Struct, frozen=True):
    """An item that failed in every lease that took it."""

    item: Any
    deliveries: int
    error: str
    """what the last holder raised"""


class Edges:
    """The edges of one channel."""

    def __init__(self) -> None:
        self._sent: dict[str, Edge] = {}
        self._taken: dict[str, Edge] = {}

    def put(self, party: str, item: Encoded) -> Edge:
        """An item came from another process."""
        edge = self._sent.get(party) or _add(self._sent, "sender", party)
        edge.items += 1
        edge.nbytes += len(item.data)
        for buffer in item.buffers:
            edge.nbytes += len(buffer)
        return edge

    def put_many(self, party: str, items: int, nbytes: int) -> None:
        """So many small items came together."""
        edge = self._sent.get(party) or _add(self._sent, "sender", party)
        edge.items += items
        edge.nbytes += nbytes

    def put_direct(self, party: str, sizes: list[int]) -> None:
        """The large arrays of so many of them did not come with them."""
        edge = self._sent.get(party) or _add(self._sent, "sender", party)
        edge.direct += len(sizes)
        edge.nbytes += sum(sizes)

    def asked(self, party: str) -> None:
        """A put had to ask, because the credit was spent."""
        edge = self._sent.get(party) or _add(self._sent, "sender", party)
        edge.credit_waits += 1

    def take(self, party: str, items: int, nbytes: int, direct: int = 0) -> None:
        """Items leave for another process, so many of them without their large arrays."""
        edge = self._taken.get(party) or _add(self._taken, "receiver", party)
        edge.items += items
        edge.nbytes += nbytes
        edge.direct += direct

    def seen(self) -> tuple[Edge, ...]:
        """What they are now."""
        every = (*self._sent.values(), *self._taken.values())
        return tuple(msgspec.structs.replace(edge) for edge in every)


def _add(edges: dict[str, Edge], end: Literal["sender", "receiver"], party: str) -> Edge:
    if len(edges) >= MAX_EDGES:
        party = OTHER_PARTIES
    found = edges.get(party)
    if found is None:
        found = edges[party] = Edge(end=end, party=party)
    return found
