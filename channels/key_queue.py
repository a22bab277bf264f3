"""The queue of one key: its entries, who waits to put or get, and what was delivered from it.

Invariants, each with a test of that name:

* an item is in exactly one place: the entries, a waiting put, a delivery (waiting or not settled),
  the dead letters, or taken;
* the order is FIFO: entries that come back go to the place that their sequence number says. Waits
  are served in arrival order; receivers with several gets that wait are served in turn;
* no wakeup is lost: an item never rests here while a get that could take it waits (of a channel
  that is `stealing`: while any get waits);
* at most ``capacity`` items and ``max_weight`` weight are admitted. Credit that senders in other
  processes hold, and items that were prefetched, count as taken room. (A single heavier item is let
  in when nothing else is there; what is returned goes back over and above.)

Nothing here waits. Items are handed directly to the gets that wait, so none can be overtaken.

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
import contextlib
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec

from rlinf_async.channels import errors
from rlinf_async.channels.encoded import (
    Encoded,
    EncodeList,
    Form,
    check_key_and_weight,
)
from rlinf_async.channels.errors import ChannelError, MalformedFrame, error_text
from rlinf_async.channels.items import channel_rule
from rlinf_async.channels.remote_payload import RemotePayload, remote_payload_of
from rlinf_async.channels.statistics import DeadLetter, Edges, Waits, current_party

if TYPE_CHECKING:
    from rlinf_async.channels.ends import Key

log = logging.getLogger(__name__)
CHECKPOINT: Final = 128
"""One put and one get of so many gives others in this loop a turn: a loop over them can be
cancelled, and starves no other task."""


class Entry(msgspec.Struct, eq=False, gc=False):
    """An item in a queue. Not tracked by the garbage collector, which would visit every one."""

    item: Any
    weight: int
    sequence: int
    """position in the order in which items came into the channel; 0 while the put waits for room"""
    deliveries: int = 0
    """how often it was handed out under a lease"""
    ready: Any = None
    """encoded form of the item, where it was made before a get asked for it"""


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
        """Give all of it back: the receiver is closed."""

    def settled(self) -> None:
        """Take note that nothing of it is left."""


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
        """entries of the delivery; None in place of each that was settled"""
        self.weight = 0
        self.requested = 0
        """number of entries that were asked for; those behind them were sent in advance"""
        self.unsettled = 0
        self.prefetched = 0
        """number of unsettled entries that were sent in advance"""
        self.waiting = False
        """whether it is among the `Turns` of its queue"""
        self.link: PrefetchLink | None = None

    @property
    @abc.abstractmethod
    def cancelled(self) -> bool:
        """Whether its wait is over, although it was not taken out of its queue yet."""

    @abc.abstractmethod
    def served(self) -> None:
        """End the wait: the delivery has its entries, and is registered as unsettled."""

    @abc.abstractmethod
    def refused(self, error: ChannelError) -> None:
        """End the wait with this error: the delivery will get no entries."""

    def over(self) -> None:  # noqa: B027  (few have anything to do)
        """All of it is settled."""

    # ---- for its queue, while it waits

    def release(self) -> list[Entry]:
        """Let go of what was collected."""
        collected, self.entries, self.weight = self.held(), [], 0
        return collected

    def held(self) -> list[Entry]:
        """The entries that are not settled."""
        return list(filter(None, self.entries))


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
        """Whether the put was cancelled, and waits no longer."""

    @abc.abstractmethod
    def admitted(self) -> None:
        """End the wait: the item is in the queue."""

    @abc.abstractmethod
    def refused(self, error: ChannelError) -> None:
        """End the wait with this error: the item will not be taken."""


class Turns:
    """The deliveries that wait under one key. Receivers are served in turn, one delivery of each,
    and the deliveries of each in the order in which they came."""

    __slots__ = ("_by_receiver", "_order", "first")

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        """receivers, the next to be served first"""
        self._by_receiver: dict[int, deque[Delivery]] = {}
        self.first: Delivery | None = None
        """delivery whose turn it is; None where none waits"""

    def __iter__(self) -> Iterator[Delivery]:
        for receiver in self._order:
            yield from self._by_receiver[receiver]

    def __len__(self) -> int:
        return sum(map(len, self._by_receiver.values()))

    @property
    def receivers(self) -> int:
        """Number of receivers that wait."""
        return len(self._order)

    def add(self, delivery: Delivery) -> None:
        """Wait behind the others of its receiver; a receiver that did not wait goes last."""
        delivery.waiting = True
        own = self._by_receiver.get(delivery.receiver)
        if own is None:
            self._by_receiver[delivery.receiver] = deque((delivery,))
            self._order.append(delivery.receiver)
            if self.first is None:
                self.first = delivery
        else:
            own.append(delivery)

    def pop_first(self) -> None:
        """Take out the delivery that was served; its receiver goes last."""
        order, receiver = self._order, self._order.popleft()
        own = self._by_receiver[receiver]
        own.popleft().waiting = False
        if own:
            order.append(receiver)
        else:
            del self._by_receiver[receiver]
        self.first = self._by_receiver[order[0]][0] if order else None

    def pass_over(self) -> None:
        """The receiver whose turn it is goes last."""
        self._order.rotate(-1)
        self.first = self._by_receiver[self._order[0]][0]

    def drop(self, delivery: Delivery) -> bool:
        """Take it out, its receiver keeps its turn; False if it does not wait here."""
        if not delivery.waiting:
            return False
        delivery.waiting = False
        order, own = self._order, self._by_receiver[delivery.receiver]
        own.remove(delivery)
        if not own:
            del self._by_receiver[delivery.receiver]
            order.remove(delivery.receiver)
        self.first = self._by_receiver[order[0]][0] if order else None
        return True

    def drop_all(self, receiver: int | None = None) -> list[Delivery]:
        """Take all out, or those of one receiver."""
        dropped = [one for one in self if receiver is None or one.receiver == receiver]
        for one in dropped:
            self.drop(one)
        return dropped


class ChannelState(abc.ABC):
    """The state of one channel that the queues of its keys read and count in."""

    __slots__ = (
        "accepts", "capacity", "channel", "copied", "credit", "credit_waits", "dead_letters",
        "decode", "direct", "edges", "encode", "encode_list", "ended", "failure", "fits", "form",
        "get_turn", "get_wait_seconds", "get_waits", "gets", "had_sender", "indirect",
        "item_type", "leases_ended", "leasing", "loaded", "lost", "max_deliveries", "max_weight",
        "name", "no_receivers_left", "open", "opened_at", "prefetched", "prefetched_weight",
        "put_turn", "put_wait_seconds", "put_waits", "receivers", "redelivered", "refused",
        "rule", "senders", "sequence", "shared", "stale", "stealing", "tap", "touched",
        "unconfirmed", "waits", "withdrawn",
    )  # fmt: skip

    def __init__(
        self, item_type: Any, name: str, capacity: int, max_weight: int | None, max_deliveries: int,
        stealing: bool = False,
    ) -> None:  # fmt: skip
        self.item_type = item_type
        self.rule = channel_rule(item_type, name)
        self.fits = self.rule.fits
        self.name = name
        self.capacity = capacity
        self.max_weight = max_weight
        self.max_deliveries = max_deliveries
        self.stealing = stealing
        """whether a get takes what lies under other keys, too: see `steal`"""
        self.tap: Tap | None = None
        """who is told of all that happens; None where nothing is recorded"""
        self.indirect = stealing
        """whether a put or a get is more than to append and to pop: ``stealing``, or recorded"""
        self.senders: dict[int, str] = {}
        """who holds each open end, by its number"""
        self.receivers: dict[int, str] = {}
        self.touched: dict[int, set[Any]] = {}
        """by number of an end: each `KeyQueue` in which it has waited, or was sent items in
        advance; under 0, those that have granted credit. Some of them are not in use any more."""
        self.leasing: dict[object, int] = {}
        """how many leases each owner of some holds"""
        self.leases_ended = 0
        self.had_sender = False
        self.open = True
        """whether the channel is neither closed nor failed"""
        self.no_receivers_left = False
        """whether there were receivers, and all have closed"""
        self.accepts = True
        """open, with a receiver that is left or may still come"""
        self.ended = False
        """no item can come any more"""
        self.failure: errors.Failure | None = None
        self.decode: Callable[[Encoded], Any] | None = None
        """set where other processes have ends, as are the next three"""
        self.encode: Callable[[Any], Encoded] | None = None
        self.encode_list: EncodeList | None = None
        self.form = Form()
        self.dead_letters: list[DeadLetter] = []
        self.edges = Edges()
        self.waits = Waits()
        self.sequence = 0
        """sequence number of the item that came in last"""
        self.opened_at: float | None = None
        """when its first end was opened: it may be made before the loop that runs it"""
        self.channel: Callable[[], object] = lambda: None
        """the `Channel` that it belongs to, while that is used"""
        self.withdrawn = 0
        """items that came in and were taken out again, since their put was cancelled"""
        self.gets = self.put_waits = self.get_waits = 0
        self.put_turn = self.get_turn = CHECKPOINT - 1
        """the ``sequence`` and the ``gets`` with which others in the loop have a turn next"""
        self.put_wait_seconds = self.get_wait_seconds = 0.0
        self.redelivered = self.unconfirmed = self.stale = 0
        self.shared = self.copied = self.direct = self.loaded = self.lost = 0
        self.credit = self.credit_waits = self.refused = 0
        self.prefetched = self.prefetched_weight = 0

    @abc.abstractmethod
    def forget(self, key: Key | None) -> None:
        """Remove this key if it is idle: keys come and go, and must not stay in memory."""

    @abc.abstractmethod
    def touch(self, end: int, queue: Any) -> None:
        """Find this `KeyQueue`, of a key, when something becomes of this end: see ``touched``."""

    @abc.abstractmethod
    def steal(self, queue: Any) -> bool:
        """Move the oldest item of any other key to this `KeyQueue`, for the get whose turn it is,
        if that takes it: where there is none here, or that one has been overtaken often enough.
        Whether one was moved."""

    @abc.abstractmethod
    def offer(self, queue: Any) -> None:
        """Let the gets of other keys steal what the gets of this `KeyQueue` have left in it; once
        the channel has ended, let them see that."""

    @abc.abstractmethod
    def unsettled(self) -> list[Delivery]:
        """Return everything that was handed out and is not settled."""

    @abc.abstractmethod
    def ended_error(self, key: Key | None) -> errors.ChannelError:
        """The error for a get under this key, of which nothing will come any more."""

    @abc.abstractmethod
    def stuck_holders(self) -> set[object]:
        """Return, of those who hold something and wait here, under whichever key, the ones that
        only wait for one another."""

    # ---- what may be asked for

    def check_put(self, key: object, weight: object) -> None:
        """Refuse a put that no receiver can take, or that weighs nothing.

        Raises:
            ChannelClosed, ChannelFailed, NoReceivers, TypeError, ValueError
        """
        self._check_open()
        if self.no_receivers_left:
            raise errors.no_receivers(self.name)
        check_key_and_weight(self.name, key, weight)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise errors.channel_failed(self.name, self.failure)
        if not self.open:
            raise errors.channel_closed(self.name)

    # ---- items

    def value(self, item: Any) -> Any:
        """The item to hand out here. One from another process is decoded now.

        Raises:
            MalformedFrame: it is not of the channel's type.
        """
        return self.decode(item) if item.__class__ is Encoded and self.decode else item

    def dead_letter(self, entry: Entry, error: BaseException | str) -> None:
        """Move an item that cannot be used to the dead letters."""
        item = entry.item
        if self.direct and (payload := remote_payload_of(item)) is not None:
            payload.start_loading().add_done_callback(
                lambda _: self._dead_letter_loaded(entry, payload, error)
            )
            return
        with contextlib.suppress(MalformedFrame):  # then it stays encoded
            item = self.value(item)
        self.dead_letters.append(DeadLetter(item, entry.deliveries, error_text(error)))
        log.error(
            "channel %r: an item is given up after %d deliveries and kept in dead_letters: %s",
            self.name,
            entry.deliveries,
            error_text(error),
        )

    def _dead_letter_loaded(
        self, entry: Entry, payload: RemotePayload, error: BaseException | str
    ) -> None:
        if payload.loaded is None:
            self.gets -= 1
            self.count_lost([entry])
        else:
            self.dead_letter(entry, error)

    def tapped(self, tap: Tap | None) -> None:
        """Tell this tap of all that happens from now on."""
        self.tap = tap
        self.indirect = self.stealing or tap is not None

    def count_lost(self, entries: list[Entry]) -> None:
        """Count entries that cannot be had: their producer died with their arrays."""
        self.lost += len(entries)
        holders = [entry.item.buffers.holder for entry in entries]
        for holder in dict.fromkeys(holders):
            log.error(
                "channel %r: %d items are lost, since %s was lost before anybody had fetched "
                "their arrays from it", self.name, holders.count(holder), holder,
            )  # fmt: skip


class Tap(Protocol):
    """What a channel that is recorded tells its recorder. Called in its loop; never waits, never
    raises."""

    def put(
        self, queue: KeyQueue, first: int, items: Sequence[Any], weight: int, sender: str
    ) -> Encoded | None:
        """Items of this weight each came in, with numbers from ``first`` on. Returned is the one
        item as it travels, where it was made for that and need not be made again."""

    def withdrawn(self, sequence: int) -> None:
        """The item with this number was taken out again: its put was cancelled."""

    def taken(self, queue: KeyQueue, sequence: int, receiver: int) -> None:
        """The end of this number got the item, at once."""

    def delivered(self, queue: KeyQueue, delivery: Delivery, entries: Sequence[Entry]) -> None:
        """A get, batch or lease was served with these."""

    def settled(
        self, queue: KeyQueue, delivery: Delivery, entries: Sequence[Entry],
        ahead: Sequence[Entry], outcome: Outcome, error: BaseException | str,
    ) -> None:  # fmt: skip
        """Entries of a delivery were settled: what was asked for, and what was sent in advance."""

    def lost(self, entries: Sequence[Entry]) -> None:
        """Entries that nobody had were lost with the process that kept their arrays."""

    def replaced(self, entry: Entry) -> None:
        """This entry has another item now."""

    def ended(self, error: str) -> None:
        """No item can come any more: the channel was closed, or failed with this."""


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
        """Grant again, where there is room now."""

    def forgotten(self) -> None:
        """Take note that it is not registered any more: it holds no credit, and its key is idle."""


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
        """weight of the entries"""
        self.putters: deque[WaitingPut] = deque()
        self.getters = Turns()
        self.deliveries: dict[Delivery, None] = {}
        """served and not settled, oldest first"""
        self.prefetching: dict[Delivery, PrefetchLink] = {}
        """deliveries with entries that were sent in advance"""
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
        """Whether the queue holds nothing and is not in use."""
        return not (
            self.entries
            or self.getters.first
            or self.putters
            or self.deliveries
            or any(one.items or one.wanting for one in self.credit_holders)
        )

    @property
    def collected(self) -> list[Entry]:
        """What the batch or lease that is next in turn has collected so far."""
        return self.getters.first.held() if self.getters.first else []

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
            if self.credit_holders:
                self.recall_credit()
            return wait
        channel.sequence = sequence = channel.sequence + 1
        entries.append(entry := Entry(item, weight, sequence))
        self.weight += weight
        if channel.tap is not None:
            sender_name = holder or current_party.get()
            entry.ready = channel.tap.put(self, sequence, (item,), weight, sender_name)
        if self.getters.first:
            self.serve()
        elif channel.stealing:
            channel.offer(self)
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
        """Take an entry out whose put was cancelled after it went through, unless it has been
        taken."""
        if entry in self.entries:
            self.entries.remove(entry)
            self.weight -= entry.weight
            self._withdraw(entry)
        elif self.getters.first and entry in (collecting := self.getters.first).entries:
            collecting.entries.remove(entry)
            collecting.weight -= entry.weight
            self._withdraw(entry)
        self.serve()
        self.channel.forget(self.key)

    def _withdraw(self, entry: Entry) -> None:
        self.channel.withdrawn += 1
        if self.channel.tap is not None:
            self.channel.tap.withdrawn(entry.sequence)

    def put_waited(self, wait: WaitingPut) -> None:
        """The put is over, in whichever way; account for its wait."""
        seconds = wait.loop.time() - wait.since
        self.channel.put_wait_seconds += seconds
        self.channel.waits.add("put", wait.holder, seconds)

    def has_room(self, weight: int) -> bool:
        """Whether an item of this weight could be admitted."""
        count = len(self.entries) + self.reserved
        limit = self.channel.max_weight
        return not count or (
            count < self.channel.capacity
            and (limit is None or self.weight + self.reserved_weight + weight <= limit)
        )

    # ---- get

    def take(self, receiver: int) -> Entry | None:
        """Deliver the head to the end of this number and settle it as taken, at once; None if one
        would have to wait."""
        entries = self.entries
        if not entries or self.getters.first or self.channel.failure is not None:
            return None
        if self.prefetching and any(not link.overdue for link in self.prefetching.values()):
            return None
        entry = entries.popleft()
        self.weight -= entry.weight
        self.channel.gets += 1
        if self.channel.tap is not None:
            self.channel.tap.taken(self, entry.sequence, receiver)
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
        channel = self.channel
        if self.entries or self.putters or channel.ended or channel.stealing:  # else: nothing
            self.serve()
            if not delivery.waiting:
                return False
        if self.prefetching:
            for link in list(self.prefetching.values()):
                link.recall(delivery.receiver)
        if self.key is not None:
            channel.touch(delivery.receiver, self)
        channel.get_waits += 1
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
        seconds = delivery.loop.time() - delivery.since
        self.channel.get_wait_seconds += seconds
        self.channel.waits.add("get", delivery.holder, seconds)

    def prefetch(self, delivery: Delivery, link: PrefetchLink, count: int) -> None:
        """Let the ``count`` oldest entries leave the queue for a receiver that has not asked for
        them; they count as queued."""
        weight = 0
        for _ in range(count):
            entry = self.entries.popleft()
            weight += entry.weight
            delivery.entries.append(entry)
        self.weight -= weight
        if not delivery.unsettled:
            self.deliveries[delivery] = None
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
        if outcome is Outcome.TAKEN and count is None and delivery.link is None:  # most are
            if self.channel.tap is not None and delivery.unsettled:
                self.channel.tap.settled(self, delivery, delivery.held(), (), outcome, error)
            delivery.entries, delivery.unsettled = [], 0
        else:
            self._settle_entries(delivery, outcome, first, count, error)
        if not delivery.unsettled:
            if delivery.lease and delivery in self.deliveries:
                leasing, owner = self.channel.leasing, delivery.owner
                leasing[owner] -= 1
                if not leasing[owner]:
                    del leasing[owner]
                self.channel.leases_ended += 1
            self.deliveries.pop(delivery, None)
            delivery.over()
        if delivery.link is not None and not delivery.prefetched:
            link, delivery.link = delivery.link, None
            del self.prefetching[delivery]
            if link not in self.prefetching.values():
                link.settled()
        if self.getters.first or self.putters or self.room_wanted:
            self.serve()
        if self.channel.stealing and not self.paused:
            self.channel.offer(self)
        if self.key is not None:
            self.channel.forget(self.key)

    def _settle_entries(
        self, delivery: Delivery, outcome: Outcome, first: int, count: int | None,
        error: BaseException | str,
    ) -> None:  # fmt: skip
        entries = delivery.entries
        stop = len(entries) if count is None else min(first + count, len(entries))
        border = min(max(delivery.requested, first), stop)
        requested = list(filter(None, entries[first:border]))
        prefetched = list(filter(None, entries[border:stop]))
        entries[first:stop] = [None] * (stop - first)
        delivery.unsettled -= len(requested) + len(prefetched)
        if self.channel.tap is not None:
            self.channel.tap.settled(self, delivery, requested, prefetched, outcome, error)
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
            if back and self.getters.first:
                back += self.getters.first.release()  # it collects again, in order
            self.insert(back)

    def replace(self, delivery: Delivery, index: int, item: Any) -> None:
        """Return this entry of a lease with another item, unless it was settled before."""
        entry = delivery.entries[index] if index < len(delivery.entries) else None
        if entry is not None:
            entry.item, entry.ready = item, None
            if self.channel.tap is not None:
                self.channel.tap.replaced(entry)
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
        channel, getters, passed = self.channel, self.getters, 0
        while (delivery := getters.first) is not None:
            if delivery.cancelled:  # its task has not run yet
                getters.drop(delivery)
                self.insert(delivery.release())
                continue
            if self.prefetching and (wait := self._wait_for_prefetched(delivery)):
                passed += 1
                if wait is _EVERYBODY or passed > getters.receivers:
                    break
                self.insert(delivery.release())  # its own process stands still: others go on
                getters.pass_over()
                continue
            if channel.stealing:
                channel.steal(self)
            full = self.collect(delivery)
            while not full and (
                (self.putters and self.admit()) or (channel.stealing and channel.steal(self))
            ):
                full = self.collect(delivery)
            if not (
                full or delivery.weight >= delivery.at_least or self._nothing_can_come(delivery)
            ):
                if channel.ended and (
                    channel.stealing or getters.receivers + len(self.deliveries) > 1
                ):
                    self._end_waits_of_holders()
                break
            getters.pop_first()
            if entries := delivery.entries:
                delivery.requested = delivery.unsettled = len(entries)
                channel.gets += len(entries)
                if delivery.lease:
                    self._count_lease(delivery)
                self.deliveries[delivery] = None
                if channel.tap is not None:
                    channel.tap.delivered(self, delivery, entries)  # type: ignore[arg-type]
                delivery.served()
            else:
                delivery.refused(channel.ended_error(self.key))
            if self.putters:
                self.admit()
        if self.room_wanted:
            self.offer_room()
        if self.entries and channel.stealing:
            channel.offer(self)

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

    def _count_lease(self, delivery: Delivery) -> None:
        for entry in delivery.held():
            entry.deliveries += 1
        leasing = self.channel.leasing
        leasing[delivery.owner] = leasing.get(delivery.owner, 0) + 1

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
        every = self.channel.unsettled() if self.channel.stealing else self.deliveries
        holders = {one.owner for one in every}
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
                self.entries.append(entry := wait.entry)
                self.weight += entry.weight
                if (tap := self.channel.tap) is not None:
                    one = (entry.item,)
                    entry.ready = tap.put(self, entry.sequence, one, entry.weight, wait.holder)
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

    def put_on_credit(self, items: Sequence[Any], each: int, holder: str = "") -> None:
        """Put items of this party that weigh so much each, for which credit was spent.

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
        if channel.tap is not None and items:
            channel.tap.put(self, channel.sequence + 1, items, each, holder)
        channel.sequence = sequence
        self.weight += each * len(items)
        if self.getters.first or channel.stealing:
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


@contextlib.contextmanager
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
            if queue.channel.stealing:
                queue.channel.offer(queue)
            queue.channel.forget(queue.key)


def _sequence(entry: Entry) -> int:
    return entry.sequence
