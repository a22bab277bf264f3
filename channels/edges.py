"""What went over each edge of a channel: from each producer into it, and from it to each consumer.

Counted where items arrive from other processes, or leave for them, in structs that are there
already: nothing is allocated for an item. What is handed over inside the owner's process has no
edge: it is what is left of ``puts`` and ``gets``.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from rlinf_async.channels.encoded import Encoded

MOST: Final = 1024
"""Edges of one channel that are told apart, in each direction; the others share the last."""
OTHERS: Final = "others"


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
    if len(edges) >= MOST:
        party = OTHERS
    found = edges.get(party)
    if found is None:
        found = edges[party] = Edge(end=end, party=party)
    return found
