"""What leaves a queue: deliveries, and how each of them ends.

Every way of getting is a delivery: entries that one receiver asked for, or was sent in advance, and
that belong to the queue until the delivery is *settled*::

    waiting --served--> delivered --settled--> over
       \\--cancelled, refused------------------/

    outcome     of a get, a batch           of a lease                 of a prefetched item
    TAKEN       the caller has it           its block ended            a get took it
    RETURNED    cancelled, connection lost  nobody entered the block,  recalled, not wanted
                                            or another item takes its
                                            place
    FAILED      -                           its block raised, or its   -
                                            holder is gone
    REJECTED    it cannot be decoded        the same                   the same
    LOST        its arrays are gone with the process that kept them

What is returned or has failed goes back to where it was: entries are ordered by their sequence
number, from wherever they return, and in whatever order. `KeyQueue.settle` does all of this.
"""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from rlinf_async.channels.errors import ChannelError


class Entry(msgspec.Struct, eq=False, gc=False):
    """An item in a queue. Not tracked by the garbage collector, which would visit every one."""

    item: Any
    weight: int
    sequence: int
    """position in the order in which items came into the channel; 0 while the put waits for room"""
    deliveries: int = 0
    """how often it was handed out under a lease"""
    ready: Any = None
    """its encoded form, where that was made before a get asked for it"""


class Outcome(IntEnum):
    """How a delivery, or a part of it, was settled. See the table above."""

    TAKEN = 0
    RETURNED = 1
    FAILED = 2
    REJECTED = 3
    LOST = 4


class PrefetchLink(Protocol):
    """A receiver in another process that can be sent items in advance."""

    overdue: bool
    """whether it has not answered a recall for so long that others are served without it"""

    def recall(self, receiver: int = 0) -> None:
        """A get waits for an item, perhaps one of this receiver: ask for what was sent in advance
        and not taken."""

    def close(self) -> None:
        """Its receiver is closed: all of it goes back."""

    def settled(self) -> None:
        """Nothing of it is left."""


class Delivery(abc.ABC):
    """One get, batch or lease: first it waits and collects entries, then it holds them.

    Args:
        receiver: number of the end that asked.
        holder: the party that asked, for reports.
        owner: the task that asked: it must not wait for its own entries.
        target: weight that it collects.
        at_least: weight from which on it is served as soon as nothing more is there.
        lease: whether settling it is left to a lease's block.
    """

    __slots__ = (
        "at_least", "entries", "holder", "lease", "link", "loop", "owner", "prefetched", "receiver",
        "requested", "since", "target", "unsettled", "waiting", "weight",
    )  # fmt: skip

    def __init__(
        self, receiver: int, holder: str, owner: object,
        target: int = 1, at_least: int = 1, lease: bool = False,
    ) -> None:  # fmt: skip
        self.receiver = receiver
        self.holder = holder
        self.owner = owner
        self.target = target
        self.at_least = at_least
        self.lease = lease
        self.loop = loop = asyncio.get_running_loop()
        self.since = loop.time()
        self.entries: list[Entry | None] = []
        """those that were settled are None"""
        self.weight = 0
        self.requested = 0
        """so many of the entries were asked for; those behind them were sent in advance"""
        self.unsettled = 0
        self.prefetched = 0
        """so many of the unsettled entries were sent in advance"""
        self.waiting = False
        """whether it is among the `Turns` of its queue"""
        self.link: PrefetchLink | None = None

    @property
    @abc.abstractmethod
    def cancelled(self) -> bool:
        """Whether its wait is over, although it was not taken out of its queue yet."""

    @abc.abstractmethod
    def served(self) -> None:
        """It has its entries, and is registered as unsettled: end the wait."""

    @abc.abstractmethod
    def refused(self, error: ChannelError) -> None:
        """It will get none: end the wait with this error."""

    def over(self) -> None:  # noqa: B027  (few have anything to do)
        """All of it is settled."""

    # ---- for its queue, while it waits

    def release(self) -> list[Entry]:
        """Let go of what was collected."""
        collected, self.entries, self.weight = self.entries, [], 0
        return [entry for entry in collected if entry is not None]

    def held(self) -> list[Entry]:
        """The entries that are not settled."""
        return [entry for entry in self.entries if entry is not None]


class WaitingPut(abc.ABC):
    """A put that waits for room."""

    __slots__ = ("entry", "holder", "loop", "sender", "since")

    def __init__(self, entry: Entry, sender: int, holder: str) -> None:
        self.entry = entry
        self.sender = sender
        self.holder = holder
        self.loop = loop = asyncio.get_running_loop()
        self.since = loop.time()

    @property
    @abc.abstractmethod
    def cancelled(self) -> bool:
        """As of `Delivery`."""

    @abc.abstractmethod
    def admitted(self) -> None:
        """Its item is in the queue: end the wait."""

    @abc.abstractmethod
    def refused(self, error: ChannelError) -> None:
        """Its item will not be taken: end the wait with this error."""


class Turns:
    """The deliveries that wait under one key. Receivers are served in turn, one delivery of each,
    and the deliveries of each in the order in which they came."""

    __slots__ = ("_by_receiver", "order")

    def __init__(self) -> None:
        self.order: deque[int] = deque()
        """receivers, the next to be served first; empty if none waits"""
        self._by_receiver: dict[int, deque[Delivery]] = {}

    def __iter__(self) -> Iterator[Delivery]:
        for receiver in self.order:
            yield from self._by_receiver[receiver]

    def __len__(self) -> int:
        return sum(map(len, self._by_receiver.values()))

    @property
    def first(self) -> Delivery:
        """Whose turn it is."""
        return self._by_receiver[self.order[0]][0]

    def add(self, delivery: Delivery) -> None:
        """Wait behind the others of its receiver; a receiver that did not wait goes last."""
        delivery.waiting = True
        own = self._by_receiver.get(delivery.receiver)
        if own is None:
            self._by_receiver[delivery.receiver] = deque((delivery,))
            self.order.append(delivery.receiver)
        else:
            own.append(delivery)

    def pop_first(self) -> None:
        """It was served: its receiver goes last."""
        receiver = self.order.popleft()
        own = self._by_receiver[receiver]
        own.popleft().waiting = False
        if own:
            self.order.append(receiver)
        else:
            del self._by_receiver[receiver]

    def drop(self, delivery: Delivery) -> bool:
        """Take it out, its receiver keeps its turn; False if it does not wait here."""
        if not delivery.waiting:
            return False
        delivery.waiting = False
        own = self._by_receiver[delivery.receiver]
        own.remove(delivery)
        if not own:
            del self._by_receiver[delivery.receiver]
            self.order.remove(delivery.receiver)
        return True

    def drop_all(self, receiver: int | None = None) -> list[Delivery]:
        """Take all out, or those of one receiver."""
        dropped = [one for one in self if receiver is None or one.receiver == receiver]
        for one in dropped:
            self.drop(one)
        return dropped
