"""One channel, in the process that owns it: its keys, its ends, and how it ends.

What happens under one key, what becomes of items that were handed out, and which invariants hold,
stands in `key_queue`. The functions below say what can be seen of a queue from
outside: who waits on it, and its counts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from typing import Any, Final, Literal

from rlinf_async.channels import errors
from rlinf_async.channels.encoded import check_key_and_weight
from rlinf_async.channels.ends import Key
from rlinf_async.channels.errors import ChannelEmpty, ChannelError, ChannelFailed, error_text
from rlinf_async.channels.key_queue import ChannelState, Delivery, KeyQueue, WaitingPut
from rlinf_async.channels.remote_payload import is_lost
from rlinf_async.channels.statistics import KeyState, Statistics, Wait, Waited

log = logging.getLogger(__name__)
LOOKED_AT: Final = 16
"""most keys with items that an error names"""
OVERTAKEN: Final = 1024
"""most items that came later and are taken before one that lies under another key"""
MIN_TOUCHED: Final = 64
"""keys, beside twice those in use, after which a set of touched queues drops idle ones"""


class Queue(ChannelState):
    """One channel: the queues of its keys, and its ends."""

    __slots__ = ("__weakref__", "_numbers", "_offered", "keys", "unkeyed")

    def __init__(
        self, item_type: Any, name: str, capacity: int, max_weight: int | None, max_deliveries: int,
        stealing: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(item_type, name, capacity, max_weight, max_deliveries, stealing)
        self.unkeyed = KeyQueue(self, None)
        self.keys: dict[Key, KeyQueue] = {}
        """queues of the keys that are in use"""
        self._numbers = count(1)
        self._offered: list[KeyQueue] = []
        """those for which `offer` has been called and has not returned"""

    # ---- keys

    def of_key(self, key: Key | None) -> KeyQueue:
        """The queue of this key, made if it is not in use."""
        if key is None:
            return self.unkeyed
        found = self.keys.get(key)
        if found is None:
            check_key_and_weight(self.name, key, 1)
            found = self.keys[key] = KeyQueue(self, key)
        return found

    def known(self, key: Key | None) -> KeyQueue | None:
        """The queue of this key, if it is in use."""
        return self.unkeyed if key is None else self.keys.get(key)

    def every_key(self) -> Iterator[KeyQueue]:
        """All that are in use."""
        yield self.unkeyed
        yield from list(self.keys.values())

    def forget(self, key: Key | None) -> None:
        if key is not None and (queue := self.keys.get(key)) is not None and queue.idle:
            del self.keys[key]
            for holder in queue.credit_holders:
                holder.forgotten()
            queue.credit_holders.clear()

    def touch(self, end: int, queue: KeyQueue) -> None:
        found = self.touched.get(end)
        if found is None:
            found = self.touched[end] = set()
        found.add(queue)
        if len(found) > 2 * len(self.keys) + MIN_TOUCHED:  # keys come and go
            found.intersection_update(self.keys.values())

    def steal(self, queue: KeyQueue) -> bool:
        others = [one for one in self.every_key() if one.entries and not one.paused]
        oldest = min(others, key=_head, default=queue)
        if oldest is queue or (queue.entries and _head(queue) - _head(oldest) <= OVERTAKEN):
            return False
        entry, get = oldest.entries[0], queue.getters.first
        if get is not None and get.weight and get.weight + entry.weight > get.target:
            return False  # it would be left here, under a key that it was not put under
        oldest.entries.popleft()
        oldest.weight -= entry.weight
        queue.insert([entry])
        if oldest.putters:
            oldest.admit()
        if oldest.room_wanted:
            oldest.offer_room()
        self.forget(oldest.key)
        return True

    def offer(self, queue: KeyQueue) -> None:
        if not (queue.entries or (self.ended and not self._offered)):
            return
        self._offered.append(queue)
        if len(self._offered) > 1:
            return  # in its turn, below: calls within calls would be as many as keys
        try:
            for one in self._offered:
                self._serve_others(one)
        finally:
            self._offered.clear()

    def _serve_others(self, queue: KeyQueue) -> None:
        waiting = [one for one in self.every_key() if one.getters.first and one is not queue]
        for other in sorted(waiting, key=_waiting_since):
            other.serve()
            if other.key in self.keys:  # of those that wait equally long, the next one in turn
                self.keys[other.key] = self.keys.pop(other.key)
            self.forget(other.key)
            if not (queue.entries or self.ended):
                break

    def _touched(self, ends: Iterable[int]) -> list[KeyQueue]:
        """Return the queues in use in which these ends have waited, and that without a key."""
        found: dict[KeyQueue, None] = {}
        for end in ends:
            found |= dict.fromkeys(self.touched.get(end, ()))
        return [self.unkeyed, *(one for one in found if self.known(one.key) is one)]

    # ---- ends

    def add_sender(self, holder: str) -> int:
        self._check_open()
        self.senders[number := self._new_end()] = holder
        self.had_sender = True
        self._ends_changed()
        return number

    def remove_sender(self, number: int) -> None:
        """Close a sender: its own waiting puts are refused, and the last one ends the channel."""
        if self.senders.pop(number, None) is None:
            return
        self._ends_changed()
        for queue in self._touched([number]):
            queue.refuse_putters(errors.closed_while_waiting, number)
            queue.serve()
            self.forget(queue.key)
        self.touched.pop(number, None)
        if not self.senders:
            for queue in self._touched(self.receivers):
                queue.serve()
                self.forget(queue.key)

    def add_receiver(self, holder: str) -> int:
        self.receivers[number := self._new_end()] = holder
        self.no_receivers_left = False
        self._ends_changed()
        return number

    def remove_receiver(self, number: int) -> None:
        """Close a receiver: its own waiting gets are refused, and with the last one all puts."""
        if self.receivers.pop(number, None) is None:
            return
        self.no_receivers_left = not self.receivers
        self._ends_changed()
        for queue in self._touched([number]):
            queue.refuse_getters(errors.closed_while_waiting, number)
            for delivery, link in list(queue.prefetching.items()):
                if delivery.receiver == number:
                    link.close()
            queue.serve()
            self.forget(queue.key)
        self.touched.pop(number, None)
        if self.no_receivers_left:
            for queue in self._touched([0, *self.senders]):
                queue.refuse_putters(errors.no_receivers)
                queue.recall_credit()
                queue.serve()
                self.forget(queue.key)

    def _ends_changed(self) -> None:
        self.accepts = self.open and not self.no_receivers_left
        ended = not self.open or (self.had_sender and not self.senders)
        if ended and not self.ended and self.tap is not None:
            self.tap.ended("" if self.failure is None else self.failure[0])
        self.ended = ended

    @staticmethod
    def now() -> float:
        """The loop's clock where one runs; channels may be made before."""
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return time.monotonic()

    def _new_end(self) -> int:
        if self.opened_at is None:
            self.opened_at = self.now()
        return next(self._numbers)

    def close(self) -> None:
        """No more items; what is queued can still be taken."""
        if self.open:
            self.open = False
            self._ends_changed()
            for queue in self.every_key():
                queue.refuse_putters(errors.channel_closed)
                queue.serve()
                queue.recall_credit()
                self.forget(queue.key)

    def fail(self, error: BaseException | str) -> None:
        """Every waiting and later use raises. The first error stays."""
        if self.failure is not None:
            return
        self.failure = (error_text(error), error if isinstance(error, BaseException) else None)
        self.open = False
        self._ends_changed()
        for queue in self.every_key():
            queue.refuse_putters(self._failed)
            queue.refuse_getters(self._failed)
            queue.recall_credit()
            for link in list(queue.prefetching.values()):
                link.recall()
            self.forget(queue.key)

    def _failed(self, name: str) -> ChannelFailed:
        return errors.channel_failed(name, self.failure or ("", None))

    def empty_error(self, key: Key | None) -> ChannelError:
        """Why a get finds nothing: the channel failed, has ended, or is just empty."""
        if self.failure is not None:
            return errors.channel_failed(self.name, self.failure)
        queue = self.known(key)
        for link in list(queue.prefetching.values()) if queue else ():
            link.recall()
        looked_at = list(self.every_key()) if self.stealing else [queue] if queue else []
        if self.ended and not any(one.entries or one.deliveries for one in looked_at):
            return self.ended_error(key)
        return ChannelEmpty(f"channel {self.name!r} is empty")

    def ended_error(self, key: Key | None) -> ChannelError:
        """Return the error that nothing will come under this key any more; it says under which
        others something is."""
        looked_at = chain([self.unkeyed], islice(self.keys.values(), LOOKED_AT))
        others = (queue for queue in looked_at if queue.key != key and queue.entries)
        return errors.channel_ended(
            self.name, key, {queue.key: len(queue.entries) for queue in others}
        )

    def check_item(self, item: Any) -> None:
        """Refuse an item that is not of the channel's type."""
        if not self.fits(item):
            self.rule.check(item)

    def check_get(self) -> None:
        """Refuse a get of a failed channel.

        Raises:
            ChannelFailed
        """
        if self.failure is not None:
            raise errors.channel_failed(self.name, self.failure)

    # ---- items

    def unsettled(self) -> list[Delivery]:
        """Everything that was handed out and is not settled."""
        return [delivery for queue in self.every_key() for delivery in queue.deliveries]

    def stuck_holders(self) -> set[object]:
        waits: dict[object, list[set[object]]] = {}
        holding: set[object] = set()
        every = self.unsettled() if self.stealing else ()
        for queue in self.every_key():
            of_key = every or queue.deliveries
            holders = {delivery.owner for delivery in of_key}
            holding |= holders
            for delivery in queue.getters:
                waits.setdefault(delivery.owner, []).append(holders - {delivery.owner})
        stuck = holding & waits.keys()
        while free := {one for one in stuck if not any(of and of <= stuck for of in waits[one])}:
            stuck -= free
        return stuck

    def contents(self) -> list[Any]:
        """Every item that is queued, collected, prefetched or leased, as it is kept. Nothing is
        taken."""
        entries = [entry for queue in self.every_key() for entry in queue.entries]
        for queue in self.every_key():
            entries += queue.collected
        for delivery in self.unsettled():
            first = 0 if delivery.lease else delivery.requested
            entries += [entry for entry in delivery.entries[first:] if entry is not None]
        return [entry.item for entry in entries]

    def drop_lost(self) -> None:
        """A producer died: items whose payload was not fetched from it are lost."""
        for queue in self.every_key():
            if queue.getters.first:
                queue.insert(queue.getters.first.release())
            lost = [entry for entry in queue.entries if is_lost(entry.item)]
            for entry in lost:
                queue.entries.remove(entry)
                queue.weight -= entry.weight
            self.count_lost(lost)
            if lost and self.tap is not None:
                self.tap.lost(lost)
            queue.serve()
            self.forget(queue.key)


def _head(queue: KeyQueue) -> int:
    """Return the place of its first item in the order of the channel."""
    return queue.entries[0].sequence


def _waiting_since(queue: KeyQueue) -> float:
    return queue.getters.first.since if queue.getters.first else math.inf


def waits_of(queue: Queue) -> list[Wait]:
    """Everybody who waits on this channel, the longest first."""
    found: list[Wait] = []
    at = (
        queue.now()
    )  # once: those who began in the same moment stay in the order in which they came
    for key in queue.every_key():
        found += _describe(queue, key, key.putters, "put", at)
        found += _describe(queue, key, key.getters, "get", at)
    return sorted(found, key=lambda wait: -wait.seconds)


def waited_on(queue: Queue) -> list[Waited]:
    """Seconds that each party has waited on this channel so far."""
    at = queue.now()
    waiting: list[tuple[Literal["put", "get"], str, float]] = [
        (operation, wait.holder, at - wait.since)
        for key in queue.every_key()
        for operation, waits in _both(key)
        for wait in waits
    ]
    holders = {
        "put": tuple(dict.fromkeys(queue.receivers.values())),
        "get": tuple(dict.fromkeys(queue.senders.values())),
    }
    return queue.waits.seen(queue.name, waiting, holders)


def _both(
    key: KeyQueue,
) -> tuple[tuple[Literal["put", "get"], Iterable[WaitingPut | Delivery]], ...]:
    return ("put", key.putters), ("get", key.getters)


def _describe(
    queue: Queue,
    of_key: KeyQueue,
    waits: Iterable[WaitingPut | Delivery],
    operation: Literal["put", "get"],
    at: float,
) -> list[Wait]:
    return [
        Wait(
            party=wait.holder,
            operation=operation,
            channel=queue.name,
            key=None if of_key.key is None else str(of_key.key),
            seconds=at - wait.since,
            unblockers=_unblockers(queue, of_key, wait),
            held_by=_held_by(of_key, wait),
        )
        for wait in waits
    ]


def _unblockers(queue: Queue, of_key: KeyQueue, wait: WaitingPut | Delivery) -> tuple[str, ...]:
    """The parties that hold the other end; when no sender is left, those whose deliveries are not
    settled: their items may come back."""
    others = list((queue.receivers if isinstance(wait, WaitingPut) else queue.senders).values())
    if not others and isinstance(wait, Delivery):
        unsettled = queue.unsettled() if queue.stealing else of_key.deliveries
        others = [one.holder for one in unsettled if one.owner != wait.owner]
    return tuple(dict.fromkeys(others))


def _held_by(of_key: KeyQueue, wait: WaitingPut | Delivery) -> tuple[str, ...]:
    """The parties that have credit, or prefetched items, which this wait could use."""
    if isinstance(wait, WaitingPut):
        found = [one.holder for one in of_key.credit_holders if one.items]
    else:
        found = [one.holder for one in of_key.prefetching]
    return tuple(dict.fromkeys(found))


def state_of(queue: Queue, key: Key | None) -> KeyState:
    """How full this key is now."""
    limit = queue.max_weight
    found = queue.known(key)
    if found is None:
        return KeyState(depth=0, weight=0, collected=0, room=queue.capacity, room_weight=limit)
    prefetched = [
        entry for one in found.prefetching for entry in one.entries[one.requested :] if entry
    ]
    return KeyState(
        depth=len(found.entries) + len(prefetched),
        weight=found.weight + sum(entry.weight for entry in prefetched),
        collected=len(found.collected),
        unsettled=len(found.deliveries),
        room=max(0, queue.capacity - len(found.entries) - found.reserved),
        room_weight=None if limit is None else max(0, limit - found.weight - found.reserved_weight),
    )


def statistics_of(queue: Queue) -> Statistics:
    """The channel's counts up to now."""
    keys = list(queue.every_key())
    waiting_putters = sum(len(key.putters) for key in keys)
    return Statistics(
        name=queue.name,
        capacity=queue.capacity,
        depth=sum(len(key.entries) for key in keys) + queue.prefetched,
        weight=sum(key.weight for key in keys) + queue.prefetched_weight,
        collected=sum(len(key.collected) for key in keys),
        keys=sum(1 for key in keys[1:] if key.entries or key.getters.first or key.putters),
        puts=queue.sequence - queue.withdrawn + waiting_putters,
        gets=queue.gets,
        put_waits=queue.put_waits,
        put_wait_seconds=queue.put_wait_seconds,
        get_waits=queue.get_waits,
        get_wait_seconds=queue.get_wait_seconds,
        waiting_putters=waiting_putters,
        waiting_getters=sum(len(key.getters) for key in keys),
        leases_out=sum(one.unsettled for one in queue.unsettled() if one.lease),
        redelivered=queue.redelivered,
        unconfirmed=queue.unconfirmed,
        dead_letters=len(queue.dead_letters),
        stale=queue.stale,
        shared=queue.shared,
        copied=queue.copied,
        prefetched=queue.prefetched,
        credit=queue.credit,
        credit_waits=queue.credit_waits,
        refused=queue.refused,
        direct=queue.direct,
        loaded=queue.loaded,
        lost=queue.lost,
        edges=queue.edges.seen(),
        senders=len(queue.senders),
        receivers=len(queue.receivers),
        seconds=0.0 if queue.opened_at is None else queue.now() - queue.opened_at,
    )
