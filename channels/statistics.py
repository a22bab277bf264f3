"""What a channel has seen so far."""

from __future__ import annotations

from typing import Any

import msgspec

from rlinf_async.channels.edges import Edge


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """One channel's counts since its first end was opened.

    Times are in seconds of the event loop's clock.
    """

    name: str
    capacity: int
    """items that each key may hold before ``put`` waits"""
    depth: int
    """items queued now, over all keys, with those that a waiting batch has collected so far (which
    take up no room)"""
    weight: int
    """their weight"""
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
    """items of other processes whose large arrays stayed there, for whoever gets them"""
    brought: int = 0
    """of those, the ones that came through this process after all: for a receiver here, or one that
    cannot reach the producer, or because the producer ended"""
    lost: int = 0
    """of those, the ones that nobody will get: the producer died before they were fetched"""
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
    """items queued, with those that a waiting batch has collected so far (which take up no room)"""
    weight: int
    """their weight"""
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
