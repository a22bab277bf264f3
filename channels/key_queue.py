"""The queue of one key: its entries, who waits to put or get, and what was delivered from it.

Invariants, each with a test of that name:

* an item is in exactly one place: the entries, a waiting put, a delivery (waiting or not settled),
  the dead letters, or taken;
* the order is FIFO: entries that come back go to the place that their sequence number says. Waits
  are served in arrival order; receivers with several gets that wait are served in turn;
* no wakeup is lost: an item never rests here while a get that could take it waits;
* at most ``capacity`` items and ``max_weight`` weight are admitted. Credit that senders in other
  processes hold, and items that were prefetched, count as taken room. (A single heavier item is let
  in when nothing else is there; what is returned goes back over and above.)

Nothing here waits. Items are handed directly to the gets that wait, so none can be overtaken.
At the end stand the deliveries to, and the puts of, tasks of the process that owns the channel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from rlinf_async.channels.channel_state import ChannelState
from rlinf_async.channels.delivery import Delivery, Entry, Outcome, PrefetchLink, Turns, WaitingPut
from rlinf_async.channels.errors import ChannelError
from rlinf_async.channels.remote_payload import PayloadLost, remote_payload_of
from rlinf_async.channels.statistics import WaitFuture, current_party

if TYPE_CHECKING:
    from rlinf_async.channels.ends import Key


P = TypeVar("P", bound=WaitingPut)
_ITSELF: Final = 1
_EVERYBODY: Final = 2


class CreditHolder(Protocol):
    """A process that was granted credit: room into which it can put without asking."""

    items: int
    """credit that is not spent"""
    holder: str
    """the party that asked for it"""
    wanting: bool
    """whether it is about to be granted some"""

    def recall(self) -> None:
        """A put waits for this room: ask for what is not spent."""

    def room_freed(self) -> None:
        """There may be room to grant again."""

    def forgotten(self) -> None:
        """It holds no credit, and its key is idle: it is not registered any more."""


class KeyQueue:
    """The state of one key of a channel."""

    __slots__ = (
        "channel", "contested", "credit_holders", "deliveries", "entries", "getters", "key",
        "paused", "prefetching", "putters", "reserved", "reserved_weight", "room_wanted", "weight",
    )  # fmt: skip

    def __init__(self, channel: ChannelState, key: Key | None) -> None:
        self.channel = channel
        self.key = key
        self.entries: deque[Entry] = deque()
        self.weight = 0
        """of the entries"""
        self.putters: deque[WaitingPut] = deque()
        self.getters = Turns()
        self.deliveries: dict[Delivery, None] = {}
        """served and not settled, oldest first"""
        self.prefetching: dict[Delivery, PrefetchLink] = {}
        """those of them with entries that were sent in advance"""
        self.reserved = 0
        """items that count although they are not here: credit, prefetched"""
        self.reserved_weight = 0
        self.credit_holders: list[CreditHolder] = []
        self.room_wanted = 0
        """free items from which on room is worth granting; 0 where no process wants credit"""
        self.paused = False
        """whether serving is suspended: several deliveries are being returned"""
        self.contested = float("-inf")
        """when another receiver last waited for prefetched items"""

    @property
    def idle(self) -> bool:
        """Whether it holds nothing and is not in use."""
        return not (
            self.entries
            or self.getters.order
            or self.putters
            or self.deliveries
            or any(one.items or one.wanting for one in self.credit_holders)
        )

    @property
    def collected(self) -> list[Entry]:
        """What the batch or lease that is next in turn has collected so far."""
        return self.getters.first.held() if self.getters.order else []

    # ---- put

    def put(
        self, item: Any, weight: int, sender: int,
        waiting: Callable[[KeyQueue, Entry, int, str], P], holder: str = "",
    ) -> P | None:  # fmt: skip
        """Put at once, or return the wait for room, which ``waiting`` makes.

        Raises:
            ChannelClosed, ChannelFailed, NoReceivers: no receiver will take it.
            TypeError, ValueError: the weight is not a positive int.
        """
        channel = self.channel
        if not channel.accepts or weight.__class__ is not int or weight < 1:
            self._check_put(weight)
        entries = self.entries
        count = len(entries) + self.reserved
        if count and (
            count >= channel.capacity
            or self.putters
            or (
                channel.max_weight is not None
                and self.weight + self.reserved_weight + weight > channel.max_weight
            )
        ):
            wait = waiting(self, Entry(item, weight, 0), sender, holder or current_party.get())
            self.putters.append(wait)
            if self.key is not None:
                channel.touch(sender, self)
            channel.put_waits += 1
            self.recall_credit()
            return wait
        channel.sequence = sequence = channel.sequence + 1
        entries.append(Entry(item, weight, sequence))
        self.weight += weight
        if self.getters.order:
            self.serve()
        return None

    def _check_put(self, weight: object) -> None:
        try:
            self.channel.check_put(self.key, weight)
        except Exception:
            self.channel.forget(self.key)  # it may have been made for this put
            raise

    def cancel_put(self, wait: WaitingPut) -> None:
        """The put was cancelled or refused: leave no item behind, unless it has been taken."""
        self.put_waited(wait)
        if wait in self.putters:
            self.putters.remove(wait)
            self.serve()  # what waits behind it may fit now
            self.channel.forget(self.key)
        else:
            self.retract(wait.entry)

    def retract(self, entry: Entry) -> None:
        """Its put was cancelled after it went through: take it out, unless it has been taken."""
        if entry in self.entries:
            self.entries.remove(entry)
            self.weight -= entry.weight
            self.channel.withdrawn += 1
        elif self.getters.order and entry in (collecting := self.getters.first).entries:
            collecting.entries.remove(entry)
            collecting.weight -= entry.weight
            self.channel.withdrawn += 1
        self.serve()
        self.channel.forget(self.key)

    def put_waited(self, wait: WaitingPut) -> None:
        """The put is over, in whichever way; account for its wait."""
        self.channel.put_wait_seconds += wait.loop.time() - wait.since

    def has_room(self, weight: int) -> bool:
        """Whether an item of this weight could be admitted."""
        count = len(self.entries) + self.reserved
        limit = self.channel.max_weight
        return not count or (
            count < self.channel.capacity
            and (limit is None or self.weight + self.reserved_weight + weight <= limit)
        )

    # ---- get

    def take(self) -> Entry | None:
        """Deliver the head and settle it as taken, at once; None if one would have to wait."""
        entries = self.entries
        if not entries or self.getters.order or self.channel.failure is not None:
            return None
        if self.prefetching and any(not link.overdue for link in self.prefetching.values()):
            return None
        entry = entries.popleft()
        self.weight -= entry.weight
        self.channel.gets += 1
        if self.putters:
            self.admit()
        if self.room_wanted:
            self.offer_room()
        if self.key is not None:
            self.channel.forget(self.key)
        return entry

    def get(self, delivery: Delivery) -> bool:
        """Serve this delivery in its turn; whether it has to wait for that."""
        self.getters.add(delivery)
        if self.entries or self.putters or self.channel.ended:  # else there is nothing to serve
            self.serve()
            if not delivery.waiting:
                return False
        for link in list(self.prefetching.values()):
            link.recall(delivery.receiver)
        if self.key is not None:
            self.channel.touch(delivery.receiver, self)
        self.channel.get_waits += 1
        return True

    def get_nowait(self, delivery: Delivery) -> bool:
        """Serve this delivery if its turn comes without a wait; whether it was served."""
        self.getters.add(delivery)
        self.serve()
        return not self.getters.drop(delivery)

    def cancel_get(self, delivery: Delivery) -> None:
        """The get was cancelled: what it was given, or had collected, stays in the channel."""
        if delivery.unsettled:
            self.settle(delivery, Outcome.RETURNED)
        else:
            if self.getters.drop(delivery):
                self.insert(delivery.release())
                self.serve()
            self.channel.forget(self.key)

    def get_waited(self, delivery: Delivery) -> None:
        """The get waits no more; account for its wait."""
        self.channel.get_wait_seconds += delivery.loop.time() - delivery.since

    def prefetch(self, delivery: Delivery, link: PrefetchLink, count: int) -> None:
        """So many entries, the oldest, leave the queue for a receiver that has not asked for them;
        they count as queued."""
        pop = self.entries.popleft
        entries = [pop() for _ in range(count)]
        weight = sum([entry.weight for entry in entries])
        self.weight -= weight
        if not delivery.unsettled:
            self.deliveries[delivery] = None
        delivery.entries += entries
        delivery.unsettled += count
        delivery.prefetched = count
        delivery.link = link
        self.prefetching[delivery] = link
        if self.key is not None:
            self.channel.touch(delivery.receiver, self)
        self._count_prefetched(count, weight)

    # ---- settle

    def settle(
        self, delivery: Delivery, outcome: Outcome, first: int = 0, count: int | None = None,
        error: BaseException | str = "",
    ) -> None:  # fmt: skip
        """End this delivery, or ``count`` of its entries from ``first`` on. Entries that were
        settled before are left out."""
        entries = delivery.entries
        if outcome is Outcome.TAKEN and count is None and delivery.link is None:  # most are
            delivery.entries, delivery.unsettled = [], 0
            self._settled(delivery)
            return
        stop = len(entries) if count is None else min(first + count, len(entries))
        border = min(max(delivery.requested, first), stop)
        requested = [entry for entry in entries[first:border] if entry is not None]
        prefetched = [entry for entry in entries[border:stop] if entry is not None]
        entries[first:stop] = [None] * (stop - first)
        delivery.unsettled -= len(requested) + len(prefetched)
        if prefetched:
            delivery.prefetched -= len(prefetched)
            weight = sum([entry.weight for entry in prefetched])
            self._count_prefetched(-len(prefetched), -weight)
            if outcome in (Outcome.TAKEN, Outcome.REJECTED):
                self.channel.gets += len(prefetched)
        if requested and outcome not in (Outcome.TAKEN, Outcome.REJECTED):
            self.channel.gets -= len(requested)
        if outcome is not Outcome.TAKEN:
            back = self._put_away(delivery, [*requested, *prefetched], outcome, error)
            if back and self.getters.order:
                back += self.getters.first.release()  # it collects again, in order
            self.insert(back)
        self._settled(delivery)

    def replace(self, delivery: Delivery, index: int, item: Any) -> None:
        """Return this entry of a lease with another item, unless it was settled before."""
        entry = delivery.entries[index] if index < len(delivery.entries) else None
        if entry is not None:
            entry.item, entry.ready = item, None
            self.settle(delivery, Outcome.RETURNED, index, 1)

    def return_except(
        self, delivery: Delivery, indices: Iterable[int], outcome: Outcome,
        error: BaseException | str = "",
    ) -> None:  # fmt: skip
        """Return a delivery, except for these entries of it, which are settled with the outcome."""
        with paused([self]):
            for index in indices:
                self.settle(delivery, outcome, index, 1, error)
            self.settle(delivery, Outcome.RETURNED)

    def _put_away(
        self, delivery: Delivery, entries: list[Entry], outcome: Outcome, error: BaseException | str
    ) -> list[Entry]:
        """Count and keep what does not go back to the queue; the rest."""
        channel = self.channel
        if outcome is Outcome.RETURNED:
            for entry in entries if delivery.lease else ():
                entry.deliveries -= 1  # it was not handed out after all
            return entries
        if outcome is Outcome.LOST:
            channel.count_lost(entries)
            return []
        if outcome is Outcome.REJECTED:
            for entry in entries:
                channel.dead_letter(entry, error)
            return []
        again: list[Entry] = []
        for entry in entries:
            if entry.deliveries >= channel.max_deliveries:
                channel.gets += 1
                channel.dead_letter(entry, error)
            else:
                again.append(entry)
        channel.redelivered += len(again)
        return again

    def _settled(self, delivery: Delivery) -> None:
        """Unregister what is over, and serve those who waited for that."""
        if not delivery.unsettled:
            if delivery.lease and delivery in self.deliveries:
                self._lease_over(delivery.owner)
            self.deliveries.pop(delivery, None)
            delivery.over()
        if delivery.link is not None and not delivery.prefetched:
            link, delivery.link = delivery.link, None
            del self.prefetching[delivery]
            if link not in self.prefetching.values():
                link.settled()
        if self.getters.order or self.putters or self.room_wanted:
            self.serve()
        if self.key is not None:
            self.channel.forget(self.key)

    def _lease_over(self, owner: object) -> None:
        self.channel.leases_ended += 1
        leasing = self.channel.leasing
        leasing[owner] -= 1
        if not leasing[owner]:
            del leasing[owner]

    def _count_prefetched(self, count: int, weight: int) -> None:
        self.reserved += count
        self.reserved_weight += weight
        self.channel.prefetched += count
        self.channel.prefetched_weight += weight

    def insert(self, entries: Iterable[Entry]) -> None:
        """Return entries to their places in the order, which are at or near the head."""
        returned = sorted(entries, key=_sequence)
        if not returned:
            return
        self.weight += sum(entry.weight for entry in returned)
        waiting = self.entries
        if not waiting or returned[-1].sequence < waiting[0].sequence:
            waiting.extendleft(reversed(returned))
            return
        for entry in returned:
            waiting.insert(bisect_left(waiting, entry.sequence, key=_sequence), entry)

    # ---- who is served next

    def serve(self) -> None:
        """Hand items to those who wait, in order, and fill the room that this makes."""
        if self.paused:
            return
        if self.putters:
            self.admit()
        getters, passed = self.getters, 0
        while getters.order:
            delivery = getters.first
            if delivery.cancelled:  # its task has not run yet
                getters.drop(delivery)
                self.insert(delivery.release())
                continue
            if self.prefetching and (wait := self._wait_for_prefetched(delivery)):
                passed += 1
                if wait is _EVERYBODY or passed > len(getters.order):
                    break
                self.insert(delivery.release())  # its own process stands still: others go on
                getters.order.rotate(-1)
                continue
            full = self.collect(delivery)
            while not full and self.putters and self.admit():
                full = self.collect(delivery)
            if not (
                full or delivery.weight >= delivery.at_least or self._nothing_can_come(delivery)
            ):
                if self.channel.ended and len(getters.order) + len(self.deliveries) > 1:
                    self._end_waits_of_holders()
                break
            getters.pop_first()
            if delivery.entries:
                self._deliver(delivery)
            else:
                delivery.refused(self.channel.ended_error(self.key))
            if self.putters:
                self.admit()
        if self.room_wanted:
            self.offer_room()

    def collect(self, delivery: Delivery) -> bool:
        """Move what fits from the entries to this delivery; whether nothing more would fit."""
        entries, target = self.entries, delivery.target
        while entries:
            weight = entries[0].weight
            if delivery.weight and delivery.weight + weight > target:
                return True  # whole items only
            delivery.entries.append(entries.popleft())
            self.weight -= weight
            delivery.weight += weight
            if delivery.weight >= target:
                return True
        return False

    def _deliver(self, delivery: Delivery) -> None:
        entries = delivery.entries
        delivery.requested = delivery.unsettled = len(entries)
        self.channel.gets += len(entries)
        if delivery.lease:
            for entry in delivery.held():
                entry.deliveries += 1
            leasing = self.channel.leasing
            leasing[delivery.owner] = leasing.get(delivery.owner, 0) + 1
        self.deliveries[delivery] = None
        delivery.served()

    def _wait_for_prefetched(self, delivery: Delivery) -> int:
        """What was prefetched is older than what is here: ask for it back. Who must wait for it: a
        process that stands still holds up its own receiver only."""
        for link in list(self.prefetching.values()):
            link.recall(delivery.receiver)
        if any(not link.overdue for link in self.prefetching.values()):
            return _EVERYBODY
        own = any(one.receiver == delivery.receiver for one in self.prefetching)
        return _ITSELF if own else 0

    def _nothing_can_come(self, delivery: Delivery) -> bool:
        """The channel has ended, and no delivery of another owner can still be returned.

        Holders that wait for one another would do so for ever: so they see the end, and all others
        see it once these have settled what they hold.
        """
        if not self.channel.ended or self.prefetching:
            return False
        holders = {one.owner for one in self.deliveries}
        if holders <= {delivery.owner}:
            return True
        if delivery.owner not in self.channel.leasing:  # it holds up nobody
            return False
        stuck = self.channel.stuck_holders()
        return delivery.owner in stuck and holders <= stuck

    def _end_waits_of_holders(self) -> None:
        """The first in turn waits for what holders may return; those wait behind it."""
        for delivery in list(self.getters)[1:]:
            if self._nothing_can_come(delivery) and self.getters.drop(delivery):
                delivery.refused(self.channel.ended_error(self.key))

    def admit(self) -> bool:
        """Let waiting puts in, in order, while there is room; whether one came in."""
        admitted = False
        while self.putters and self.has_room(self.putters[0].entry.weight):
            wait = self.putters.popleft()
            if not wait.cancelled:  # else its task has not run yet
                self.channel.sequence += 1
                wait.entry.sequence = self.channel.sequence
                self.entries.append(wait.entry)
                self.weight += wait.entry.weight
                wait.admitted()
                admitted = True
        return admitted

    def refuse_putters(
        self, error: Callable[[str], ChannelError], sender: int | None = None
    ) -> None:
        """Raise an error of their own in all waiting puts, or in those of one sender."""
        refused = [wait for wait in self.putters if sender is None or wait.sender == sender]
        for wait in refused:
            self.putters.remove(wait)
        for wait in refused:
            wait.refused(error(self.channel.name))

    def refuse_getters(
        self, error: Callable[[str], ChannelError], receiver: int | None = None
    ) -> None:
        """Raise an error of their own in all waiting gets, or in those of one receiver."""
        for delivery in self.getters.drop_all(receiver):
            self.insert(delivery.release())
            delivery.refused(error(self.channel.name))

    # ---- credit

    def room_to_grant(self) -> tuple[int, int | None]:
        """Items, and weight where it is bounded, for which credit could be granted: none while
        somebody waits."""
        limit = self.channel.max_weight
        if self.putters or not self.channel.accepts:
            return 0, None if limit is None else 0
        items = max(0, self.channel.capacity - len(self.entries) - self.reserved)
        return items, None if limit is None else max(0, limit - self.weight - self.reserved_weight)

    def reserve(self, items: int, weight: int) -> None:
        """Grant so much of it (or take so much back, where it is negative)."""
        self.reserved += items
        self.reserved_weight += weight
        self.channel.credit += items

    def put_on_credit(self, items: Sequence[Any], each: int) -> None:
        """Put items that weigh so much each, for which credit was spent.

        Raises:
            ChannelClosed, ChannelFailed, NoReceivers: no receiver will take them.
        """
        channel = self.channel
        if not channel.accepts or each != 1:
            self._check_put(each)
        sequence, push = channel.sequence, self.entries.append
        for item in items:
            sequence += 1
            push(Entry(item, each, sequence))
        channel.sequence = sequence
        self.weight += each * len(items)
        if self.getters.order:
            self.serve()

    def recall_credit(self) -> None:
        """A put waits for room: ask for credit that is not spent."""
        for holder in list(self.credit_holders):
            holder.recall()

    def offer_room(self) -> None:
        """Room was freed: grant it to those who want it, if it is enough to be worth a message."""
        free = self.channel.capacity - len(self.entries) - self.reserved
        if not self.putters and free >= self.room_wanted:
            self.room_wanted = 0
            for holder in list(self.credit_holders):
                holder.room_freed()


@contextmanager
def paused(queues: Iterable[KeyQueue]) -> Iterator[None]:
    """Suspend serving until the block ends: what is returned in it, in whatever order, is back
    before anything is delivered again."""
    stopped = [queue for queue in dict.fromkeys(queues) if not queue.paused]
    for queue in stopped:
        queue.paused = True
    try:
        yield
    finally:
        for queue in stopped:
            queue.paused = False
        for queue in stopped:
            queue.serve()
            queue.channel.forget(queue.key)


def _sequence(entry: Entry) -> int:
    return entry.sequence


LOAD_AHEAD: Final = 4
"""Items behind the one that is taken in this process, which are loaded meanwhile."""


class LocalDelivery(Delivery):
    """A delivery to a task of this process, which awaits ``future``."""

    __slots__ = ("future", "queue")

    def __init__(
        self, queue: KeyQueue, receiver: int, holder: str, owner: object,
        target: int = 1, at_least: int = 1, lease: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(receiver, holder, owner, target, at_least, lease)
        self.queue = queue
        self.future = WaitFuture(loop=self.loop)

    @property
    def cancelled(self) -> bool:
        return self.future.done()

    def served(self) -> None:
        self.future.set_result(None)

    def refused(self, error: ChannelError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class LocalPut(WaitingPut):
    """A put of a task of this process, which awaits ``future``."""

    __slots__ = ("future",)

    def __init__(self, queue: KeyQueue, entry: Entry, sender: int, holder: str) -> None:
        super().__init__(entry, sender, holder)
        self.future = WaitFuture(loop=self.loop)

    @property
    def cancelled(self) -> bool:
        return self.future.done()

    def admitted(self) -> None:
        self.future.set_result(None)

    def refused(self, error: ChannelError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


def load_ahead(queue: KeyQueue) -> None:
    """Load the payloads of the first items: a receiver in this process will take them."""
    for entry in islice(queue.entries, LOAD_AHEAD):
        if (payload := remote_payload_of(entry.item)) is not None and not payload.lost:
            payload.start_loading()


async def load_payloads(delivery: LocalDelivery) -> bool:
    """Wait until all of these items are here; False if some are lost, and the others returned."""
    load_ahead(delivery.queue)
    lost: list[int] = []
    payloads = [remote_payload_of(entry.item) for entry in delivery.held()]
    for payload in payloads:
        if payload is not None and not payload.lost:
            payload.start_loading()
    for index, payload in enumerate(payloads):
        try:
            if payload is not None:
                await payload.wait_loaded()
        except PayloadLost:
            lost.append(index)
    if lost:
        delivery.queue.return_except(delivery, lost, Outcome.LOST)
    return not lost
