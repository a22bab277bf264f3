"""One channel, in the process that owns it: its keys, its ends, and how it ends.

What happens under one key, and which invariants hold, stands in `key_queue`; what becomes of items
that were handed out, in `delivery`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from rlinf_async.channels import errors
from rlinf_async.channels.delivery import Delivery, Entry
from rlinf_async.channels.encoded import Encoded, Form
from rlinf_async.channels.ends import Key
from rlinf_async.channels.errors import (
    ChannelEmpty,
    ChannelError,
    ChannelFailed,
    MalformedFrame,
    error_text,
)
from rlinf_async.channels.itemtypes import check_item, check_key_and_weight, item_class
from rlinf_async.channels.key_queue import KeyQueue
from rlinf_async.channels.remote_payload import RemotePayload, is_lost, remote_payload_of
from rlinf_async.channels.round_trip import round_trip_check
from rlinf_async.channels.statistics import DeadLetter, Edges

log = logging.getLogger(__name__)


class Queue:
    """The state of one channel."""

    __slots__ = (
        "__weakref__",
        "_numbers",
        "accepts",
        "capacity",
        "channel",
        "copied",
        "credit",
        "credit_waits",
        "dead_letters",
        "decode",
        "direct",
        "edges",
        "encode",
        "failure",
        "form",
        "get_wait_seconds",
        "get_waits",
        "gets",
        "had_sender",
        "item_class",
        "item_type",
        "keys",
        "loaded",
        "lost",
        "max_deliveries",
        "max_weight",
        "name",
        "no_receivers_left",
        "open",
        "opened_at",
        "prefetched",
        "prefetched_weight",
        "put_wait_seconds",
        "put_waits",
        "receivers",
        "redelivered",
        "refused",
        "round_trip",
        "senders",
        "sequence",
        "shared",
        "stale",
        "unconfirmed",
        "unkeyed",
        "withdrawn",
    )  # fmt: skip

    def __init__(
        self, item_type: Any, name: str, capacity: int, max_weight: int | None, max_deliveries: int
    ) -> None:
        self.item_type = item_type
        self.item_class = item_class(item_type)
        self.round_trip = round_trip_check(item_type, name)
        if self.round_trip is not None:
            self.item_class = item_class(item_type, check_all=True)
        self.name = name
        self.capacity = capacity
        self.max_weight = max_weight
        self.max_deliveries = max_deliveries
        self.unkeyed = KeyQueue(self, None)
        self.keys: dict[Key, KeyQueue] = {}
        """those that are in use"""
        self.senders: dict[int, str] = {}
        """who holds each open end, by its number"""
        self.receivers: dict[int, str] = {}
        self.had_sender = False
        self.open = True
        """not closed, not failed"""
        self.no_receivers_left = False
        """there were receivers, and all have closed"""
        self.accepts = True
        """open, with a receiver that is left or may still come"""
        self.failure: errors.Failure | None = None
        self.decode: Callable[[Encoded], Any] | None = None
        """set where other processes have ends, as are the next two"""
        self.encode: Callable[[Any], Encoded] | None = None
        self.form = Form()
        self.dead_letters: list[DeadLetter] = []
        self.edges = Edges()
        self.sequence = 0
        """of the item that came in last"""
        self.opened_at: float | None = None
        """when its first end was opened: it may be made before the loop that runs it"""
        self.channel: Callable[[], object] = lambda: None
        """the `Channel` that it belongs to, while that is used"""
        self._numbers = count(1)
        self.withdrawn = 0
        """items that came in and were taken out again, since their put was cancelled"""
        self.gets = self.put_waits = self.get_waits = 0
        self.put_wait_seconds = self.get_wait_seconds = 0.0
        self.redelivered = self.unconfirmed = self.stale = 0
        self.shared = self.copied = self.direct = self.loaded = self.lost = 0
        self.credit = self.credit_waits = self.refused = 0
        self.prefetched = self.prefetched_weight = 0

    @property
    def ended(self) -> bool:
        """No item can come any more."""
        return not self.open or (self.had_sender and not self.senders)

    @staticmethod
    def now() -> float:
        """The loop's clock where one runs; channels may be made before."""
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return time.monotonic()

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

    def forget(self, queue: KeyQueue) -> None:
        """Keys come and go; an idle one must not stay in memory."""
        if queue.key is not None and queue.idle and self.keys.get(queue.key) is queue:
            del self.keys[queue.key]
            for holder in queue.credit_holders:
                holder.forgotten()
            queue.credit_holders.clear()

    # ---- ends

    def add_sender(self, holder: str) -> int:
        self._check_open()
        self.senders[number := self._new_end()] = holder
        self.had_sender = True
        return number

    def remove_sender(self, number: int) -> None:
        """Close a sender: its own waiting puts are refused, and the last one ends the channel."""
        if self.senders.pop(number, None) is not None:
            for queue in self.every_key():
                queue.refuse_putters(errors.closed_while_waiting, number)
                queue.serve()
                self.forget(queue)

    def add_receiver(self, holder: str) -> int:
        self.receivers[number := self._new_end()] = holder
        self.no_receivers_left = False
        self.accepts = self.open
        return number

    def remove_receiver(self, number: int) -> None:
        """Close a receiver: its own waiting gets are refused, and with the last one all puts."""
        if self.receivers.pop(number, None) is None:
            return
        self.no_receivers_left = not self.receivers
        self.accepts = self.open and not self.no_receivers_left
        for queue in self.every_key():
            queue.refuse_getters(errors.closed_while_waiting, number)
            for delivery, link in list(queue.prefetching.items()):
                if delivery.receiver == number:
                    link.close()
            if self.no_receivers_left:
                queue.refuse_putters(errors.no_receivers)
                queue.recall_credit()
            queue.serve()
            self.forget(queue)

    def _new_end(self) -> int:
        if self.opened_at is None:
            self.opened_at = self.now()
        return next(self._numbers)

    def close(self) -> None:
        """No more items; what is queued can still be taken."""
        if self.open:
            self.open = self.accepts = False
            for queue in self.every_key():
                queue.refuse_putters(errors.channel_closed)
                queue.serve()
                queue.recall_credit()
                self.forget(queue)

    def fail(self, error: BaseException | str) -> None:
        """Every waiting and later use raises. The first error stays."""
        if self.failure is not None:
            return
        self.failure = (error_text(error), error if isinstance(error, BaseException) else None)
        self.open = self.accepts = False
        for queue in self.every_key():
            queue.refuse_putters(self._failed)
            queue.refuse_getters(self._failed)
            queue.recall_credit()
            for link in list(queue.prefetching.values()):
                link.recall()
            self.forget(queue)

    def _failed(self, name: str) -> ChannelFailed:
        return errors.channel_failed(name, self.failure or ("", None))

    def _check_open(self) -> None:
        if self.failure is not None:
            raise errors.channel_failed(self.name, self.failure)
        if not self.open:
            raise errors.channel_closed(self.name)

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

    def check_item(self, item: Any) -> None:
        """Refuse an item that is not of the channel's type."""
        check_item(item, self.item_type, self.item_class, self.name)
        if self.round_trip is not None:
            self.round_trip.check(item)

    def check_get(self) -> None:
        """Refuse a get of a failed channel.

        Raises:
            ChannelFailed
        """
        if self.failure is not None:
            raise errors.channel_failed(self.name, self.failure)

    def empty_error(self, key: Key | None) -> ChannelError:
        """Why a get finds nothing: the channel failed, has ended, or is just empty."""
        if self.failure is not None:
            return errors.channel_failed(self.name, self.failure)
        queue = self.known(key)
        for link in list(queue.prefetching.values()) if queue else ():
            link.recall()
        busy = queue is not None and (queue.entries or queue.deliveries)
        if self.ended and not busy:
            return errors.channel_ended(self.name)
        return ChannelEmpty(f"channel {self.name!r} is empty")

    # ---- items

    def value(self, item: Any) -> Any:
        """The item to hand out here. One from another process is decoded now.

        Raises:
            MalformedFrame: it is not of the channel's type.
        """
        return self.decode(item) if item.__class__ is Encoded and self.decode else item

    def unsettled(self) -> list[Delivery]:
        """Everything that was handed out and is not settled."""
        return [delivery for queue in self.every_key() for delivery in queue.deliveries]

    def stuck_holders(self) -> set[object]:
        """Of those who hold something and wait here, under whichever key, the ones that only wait
        for one another."""
        waits: dict[object, list[set[object]]] = {}
        holding: set[object] = set()
        for queue in self.every_key():
            holders = {delivery.owner for delivery in queue.deliveries}
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

    def drop_lost(self) -> None:
        """A producer died: items whose payload was not fetched from it are lost."""
        for queue in self.every_key():
            if queue.getters.order:
                queue.insert(queue.getters.first.release())
            lost = [entry for entry in queue.entries if is_lost(entry.item)]
            for entry in lost:
                queue.entries.remove(entry)
                queue.weight -= entry.weight
            self.count_lost(lost)
            queue.serve()
            self.forget(queue)

    def count_lost(self, entries: list[Entry]) -> None:
        """These cannot be had: their producer died with their arrays."""
        self.lost += len(entries)
        holders = [entry.item.buffers.holder for entry in entries]
        for holder in dict.fromkeys(holders):
            log.error(
                "channel %r: %d items are lost, since %s was lost before anybody had fetched "
                "their arrays from it", self.name, holders.count(holder), holder,
            )  # fmt: skip
