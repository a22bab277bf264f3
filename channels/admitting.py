"""The way into a channel: its lanes, their room, and those who wait for it. See `serving`."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from rlinf_async.channels import endings
from rlinf_async.channels.edges import Edges
from rlinf_async.channels.encoded import Encoded, Form
from rlinf_async.channels.ends import Key
from rlinf_async.channels.errors import ChannelError
from rlinf_async.channels.itemtypes import check_key_and_weight, item_class
from rlinf_async.channels.lanes import Entry, Lane, LeaseRecord, PutWait, now
from rlinf_async.channels.statistics import DeadLetter
from rlinf_async.channels.waitfor import current_party


class Admitting(abc.ABC):
    """The state of a channel, and the rules by which items are let into it."""

    __slots__ = (
        "__weakref__", "_numbers", "_seq", "_unput", "ahead", "ahead_weight", "born", "brought",
        "capacity", "copied", "credit_waits", "dead_letters", "decode", "deserted", "direct",
        "edges", "encode", "failure", "form", "get_wait_seconds", "get_waits", "gets", "had_sender",
        "item_class",
        "item_type", "lane", "lanes", "leases", "lent", "lost", "max_deliveries", "max_weight",
        "name", "open",
        "put_wait_seconds", "put_waits", "receivers", "redelivered", "refused", "senders", "shared",
        "stale", "unconfirmed",
    )  # fmt: skip

    def __init__(
        self, item_type: Any, name: str, capacity: int, max_weight: int | None, max_deliveries: int
    ) -> None:
        self.item_type = item_type
        self.item_class = item_class(item_type)
        self.name = name
        self.capacity = capacity
        self.max_weight = max_weight
        self.max_deliveries = max_deliveries
        self.lane = Lane(None)
        self.lanes: dict[Key, Lane] = {}
        self.senders: dict[int, str] = {}
        self.receivers: dict[int, str] = {}
        self.leases: dict[int, LeaseRecord] = {}
        self.dead_letters: list[DeadLetter] = []
        self.open = True  # not closed, not failed: what the fast path asks
        # set where other processes have ends
        self.decode: Callable[[Encoded], Any] | None = None
        self.encode: Callable[[Any], Encoded] | None = None
        self.form = Form()
        self.failure: endings.Failure | None = None
        self.had_sender = False
        self.deserted = False  # there were receivers, and all have closed
        self._unput = self.gets = self.put_waits = self.get_waits = 0
        self.put_wait_seconds = self.get_wait_seconds = 0.0
        self.redelivered = self.unconfirmed = self.stale = self.shared = self.copied = 0
        self.lent = self.credit_waits = self.refused = 0
        self.direct = self.brought = self.lost = 0
        self.edges = Edges()
        self.ahead = self.ahead_weight = 0
        self._numbers = count(1)
        self._seq = 0
        self.born: float | None = None  # not yet: it may be made before the loop that runs it

    @property
    def puts(self) -> int:
        """Items that were put; those that were taken back from the way in do not count."""
        return self._seq - self._unput

    @property
    def ended(self) -> bool:
        """No item can come any more."""
        return not self.open or (self.had_sender and not self.senders)

    # ---- put

    def start_put(
        self, item: Any, key: Key | None, weight: int, party: str | None = None, end: int = 0
    ) -> PutWait | None:
        """Put at once, or return the wait for room, which the sender numbered ``end`` owns.

        Raises:
            ChannelClosed, ChannelFailed, NoReceivers: nobody will take it.
            ValueError: ``weight`` is not positive.
        """
        if (
            key is None
            and self.open
            and not self.deserted
            and weight.__class__ is int
            and weight > 0
        ):
            lane = self.lane  # the common case, without a call
        else:
            self._check_put(key, weight)
            lane = self._lane(key)
        self._seq = seq = self._seq + 1
        entry = Entry(item, weight, seq)
        entries = lane.entries
        count = len(entries) + lane.held
        if count and (
            count >= self.capacity
            or lane.putters
            or (
                self.max_weight is not None
                and lane.weight + lane.held_weight + weight > self.max_weight
            )
        ):
            wait = PutWait(lane, entry, party or current_party.get(), end)
            lane.putters.append(wait)
            self.put_waits += 1
            self._recall(lane)
            return wait
        entries.append(entry)
        lane.weight += weight
        if lane.getters:
            self._serve(lane)
        return None

    def has_room(self, key: Key | None, weight: int) -> bool:
        """Whether a put would succeed at once; raises what `start_put` raises."""
        self._check_put(key, weight)
        lane = self.lane if key is None else self.lanes.get(key)
        if lane is None or (not lane.putters and self._has_room(lane, weight)):
            return True
        self._recall(lane)
        return False

    def abandon_put(self, wait: PutWait) -> None:
        """The putter was cancelled or refused: leave no item behind, unless it has been taken."""
        self.finish_put(wait)
        if wait.future.done() and not wait.future.cancelled():
            wait.future.exception()  # seen: asyncio must not log it as never retrieved
        lane = wait.lane
        if wait in lane.putters:
            lane.putters.remove(wait)
            self._unput += 1
        elif wait.entry in lane.entries:
            lane.entries.remove(wait.entry)
            lane.weight -= wait.entry.weight
            self._unput += 1
        self._serve(lane)  # what waits behind it may fit now
        self._forget(lane)

    def retract(self, key: Key | None, item: Any) -> None:
        """Its put was cancelled after it went through: take it out, unless it has been taken."""
        lane = self._lane(key)
        for entry in lane.entries:
            if entry.item is item:
                lane.entries.remove(entry)
                lane.weight -= entry.weight
                self._unput += 1
                break
        self._serve(lane)
        self._forget(lane)

    def finish_put(self, wait: PutWait) -> None:
        """The put is over, in whichever way; account for its wait."""
        self.put_wait_seconds += now() - wait.since

    # ---- inside

    def _lane(self, key: Key | None) -> Lane:
        if key is None:
            return self.lane
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(key)
        return lane

    def _check_put(self, key: object, weight: object) -> None:
        self._check_open()
        if self.deserted:
            raise endings.no_receivers(self.name)
        check_key_and_weight(self.name, key, weight)

    def every_lane(self) -> Iterator[Lane]:
        yield self.lane
        yield from list(self.lanes.values())

    def _forget(self, lane: Lane) -> None:
        """Keys come and go; an idle one must not stay in memory."""
        if lane.key is not None and lane.idle and self.lanes.get(lane.key) is lane:
            del self.lanes[lane.key]

    def _has_room(self, lane: Lane, weight: int) -> bool:
        count = len(lane.entries) + lane.held
        if not count:
            return True
        if count >= self.capacity:
            return False
        return self.max_weight is None or lane.weight + lane.held_weight + weight <= self.max_weight

    def _admit(self, lane: Lane) -> bool:
        """Let waiting putters in, in order, while there is room; whether one came in."""
        admitted = False
        while lane.putters and self._has_room(lane, lane.putters[0].entry.weight):
            wait = lane.putters.popleft()
            if wait.future.done():  # cancelled; its task has not run yet
                self._unput += 1
            else:
                lane.push(wait.entry)
                wait.future.set_result(None)
                admitted = True
        return admitted

    def _recall(self, lane: Lane) -> None:
        """Somebody waits for room: ask for what was lent of it."""
        for borrower in lane.borrowers:
            borrower.recall()

    def _feed(self, lane: Lane) -> None:
        """There may be room that can be lent."""
        if not lane.putters and self.capacity - len(lane.entries) - lane.held >= lane.hunger:
            lane.hunger = 0
            for borrower in lane.borrowers:
                borrower.feed()

    def _refuse_putters(
        self, lane: Lane, error: Callable[[str], ChannelError], end: int | None = None
    ) -> None:
        """Raise an error of their own in all waiting puts, or in those of one sender."""
        refused = [wait for wait in lane.putters if end is None or wait.end == end]
        lane.putters = deque(wait for wait in lane.putters if not (end is None or wait.end == end))
        self._unput += len(refused)
        for wait in refused:
            if not wait.future.done():
                wait.future.set_exception(error(self.name))

    def _check_open(self) -> None:
        if self.failure is not None:
            raise endings.failed(self.name, self.failure)
        if not self.open:
            raise endings.closed(self.name)

    @abc.abstractmethod
    def _serve(self, lane: Lane) -> None:
        """Hand items to those who wait, in order, and fill the room that this makes."""
