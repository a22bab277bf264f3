"""Who is served next: items, those who have one to give, and those who want one.

Invariants, each with a test of that name:

* an item is in exactly one place: a lane, a waiting put, a batch being collected, a lease, the dead
  letters, or taken;
* the order is FIFO for each key, and whoever waits is served in arrival order;
* no wakeup is lost: an item never rests in a lane while somebody who could take it waits;
* a lane admits at most ``capacity`` items and ``max_weight`` weight, the room that it has lent
  included (a single heavier item is let in when it is empty; what a lease or a cancelled get
  returns goes back over and above).

Nothing here waits: ``start_...`` either finishes at once or returns a wait whose future the end
awaits. Items are handed directly to the waiter, so nobody can overtake it; a waiter that is
cancelled afterwards gives them back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from rlinf_async.channels import endings
from rlinf_async.channels.edges import Edges
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.ends import Key
from rlinf_async.channels.errors import (
    ChannelEmpty,
    ChannelError,
)
from rlinf_async.channels.itemtypes import check_key_and_weight, runtime_class
from rlinf_async.channels.lanes import Entry, GetWait, Lane, LeaseRecord, PutWait, now
from rlinf_async.channels.statistics import DeadLetter
from rlinf_async.channels.waitfor import current_party


class Serving:
    """The lanes of one channel, and the rules by which they are served. See the invariants."""

    def __init__(
        self, item_type: Any, name: str, capacity: int, max_weight: int | None, max_deliveries: int
    ) -> None:
        self.item_type = item_type
        self.item_class = runtime_class(item_type)
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
        self.decode: Callable[[Encoded], Any] | None = None  # set where other processes put
        self.failure: endings.Failure | None = None
        self.had_sender = False
        self.deserted = False  # there were receivers, and all have closed
        self._unput = self.gets = self.put_waits = self.get_waits = 0
        self.put_wait_seconds = self.get_wait_seconds = 0.0
        self.redelivered = self.unconfirmed = self.stale = self.shared = self.copied = 0
        self.lent = self.credit_waits = self.refused = 0
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

    # ---- get

    def take_one(self, key: Key | None) -> Entry | None:
        """The head of this key at once, or None if one would have to wait for it."""
        lane = self.lane if key is None else self.lanes.get(key)
        if (
            lane is None
            or not (entries := lane.entries)
            or lane.getters
            or lane.readers
            or self.failure is not None
        ):
            return None
        entry = entries.popleft()
        lane.weight -= entry.weight
        self.gets += 1
        if lane.putters:
            self._admit(lane)
        if lane.hunger:
            self._feed(lane)
        if key is not None:
            self._forget(lane)
        return entry

    def start_get(
        self,
        key: Key | None,
        target: int,
        at_least: int | None,
        party: str | None = None,
        end: int = 0,
        owner: object = None,
    ) -> list[Entry] | GetWait:
        """Take a batch at once, or return the wait for it, which the receiver ``end`` owns.

        ``owner`` is who would hold its lease: the task, or by default the party.

        Raises:
            EndOfChannel, ChannelFailed: nothing will come.
            ValueError: ``target`` or ``at_least`` is not positive.
        """
        if key is not None:
            check_key_and_weight(self.name, key, 1)
        least = target if at_least is None else at_least
        if not 1 <= least <= target:
            raise ValueError(
                f"channel {self.name!r}: a batch needs 1 <= at_least <= weight, "
                f"got weight={target}, at_least={at_least}"
            )
        if self.failure is not None:
            raise endings.failed(self.name, self.failure)
        lane = self._lane(key)
        wait = GetWait(lane, target, least, party or current_party.get(), end, owner)
        lane.getters.append(wait)
        if lane.entries or lane.putters or self.ended:  # else nobody could be served
            self._serve(lane)
        if wait.future.done():
            lane.handed.discard(wait)
            self._forget(lane)
            return wait.future.result()
        for reader in lane.readers:
            reader.recall(end)
        self.get_waits += 1
        return wait

    def abandon_get(self, wait: GetWait) -> None:
        """The getter was cancelled: what it was handed or had collected stays in the channel."""
        if wait.future.done() and not wait.future.cancelled():
            if wait.future.exception() is None:
                self.return_entries(wait.lane.key, wait.future.result())
        elif wait in wait.lane.getters:
            wait.lane.getters.remove(wait)
            wait.lane.push_back(wait.taken)
            self._serve(wait.lane)

    def finish_get(self, wait: GetWait) -> None:
        """The get is over, in whichever way; account for its wait."""
        self.get_wait_seconds += now() - wait.since
        lane = wait.lane
        lane.handed.discard(wait)
        if lane.getters and self.ended:  # they can see the end now
            self._serve(lane)
        if lane.key is not None:
            self._forget(lane)

    def return_entries(self, key: Key | None, entries: list[Entry]) -> None:
        """Put entries that were taken back at the head, before what is being collected."""
        lane = self._lane(key)
        self.gets -= len(entries)
        lane.push_back(entries)
        if lane.getters:
            lane.push_back(lane.getters[0].give_back())
        self._serve(lane)

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

    def _serve(self, lane: Lane) -> None:
        """Hand items to those who wait, in order, and fill the room that this makes."""
        if lane.putters:
            self._admit(lane)
        while lane.getters:
            wait = lane.getters[0]
            if wait.future.done():  # cancelled; its task has not run yet
                lane.getters.popleft()
                lane.push_back(wait.give_back())
                continue
            if lane.readers and any(reader.end != wait.end for reader in lane.readers):
                break  # what was sent ahead is older, and on its way back
            full = wait.collect()
            while not full and lane.putters and self._admit(lane):  # lent room is no room
                full = wait.collect()
            if not (full or wait.enough or self._nothing_can_come(lane, wait)):
                break
            lane.getters.popleft()
            self._deliver(wait)
            if lane.putters:
                self._admit(lane)
        if lane.hunger:
            self._feed(lane)

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

    def _nothing_can_come(self, lane: Lane, wait: GetWait) -> bool:
        """The channel has ended, and no lease of another party can still give its items back.

        Holders that wait here themselves count as done: each would wait for the others for ever.
        """
        if not self.ended or lane.handed or lane.readers:
            return False
        others = {lease.owner for lease in self.leases.values() if lease.key == lane.key}
        return others - {wait.owner} <= {getter.owner for getter in lane.getters}

    def _after_lease(self, lease: LeaseRecord) -> None:
        """Those who waited for the items of this last lease can see the end now."""
        lane = self._lane(lease.key)
        if self.ended:
            self._serve(lane)
        self._forget(lane)

    def _deliver(self, wait: GetWait) -> None:
        if wait.taken:
            self.gets += len(wait.taken)
            wait.lane.handed.add(wait)
            wait.future.set_result(wait.taken)
        else:
            wait.future.set_exception(endings.ended(self.name))

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

    def _refuse_getters(
        self, lane: Lane, error: Callable[[str], ChannelError], end: int | None = None
    ) -> None:
        """Raise an error of their own in all waiting gets, or in those of one receiver."""
        refused = [wait for wait in lane.getters if end is None or wait.end == end]
        lane.getters = deque(wait for wait in lane.getters if not (end is None or wait.end == end))
        for wait in refused:
            lane.push_back(wait.give_back())
            if not wait.future.done():
                wait.future.set_exception(error(self.name))

    def _check_open(self) -> None:
        if self.failure is not None:
            raise endings.failed(self.name, self.failure)
        if not self.open:
            raise endings.closed(self.name)

    def empty_error(self, key: Key | None) -> ChannelError:
        """Why a get finds nothing: the channel failed, has ended, or is just empty."""
        if self.failure is not None:
            return endings.failed(self.name, self.failure)
        lane = self._lane(key)
        for reader in lane.readers:
            reader.recall(0)
        ended = self.ended and not (lane.entries or lane.readers or self.leases)
        self._forget(lane)
        return (
            endings.ended(self.name) if ended else ChannelEmpty(f"channel {self.name!r} is empty")
        )
