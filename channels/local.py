"""Channels whose queue lives in this process: an item is handed over by reference."""

from __future__ import annotations

import asyncio
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rlinf_async.channels.away import away_of, bring, start_ahead
from rlinf_async.channels.ends import Key, Lease, Receiver, Sender
from rlinf_async.channels.errors import ChannelClosed, ChannelEmpty, ChannelFull
from rlinf_async.channels.lanes import Entry, GetWait
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.statistics import DeadLetter, Statistics
from rlinf_async.channels.waitfor import Wait, current_party

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Channel(Generic[T]):
    """A bounded, typed, ordered channel between any number of senders and receivers.

    Args:
        item_type: what it carries: a `msgspec.Struct`, a dataclass, or anything that msgspec can
            encode; or a union of these: ``Channel[Left | Right](Left | Right, name=...)``.
        name: stands in every error and report.
        capacity: items that may be queued under each key before ``put`` waits.
        max_weight: their total weight (tokens, sequences, bytes) under each key, if it is bounded
            too.
        max_deliveries: how often an item is handed out by lease before it goes to the dead letters.

    ``sender`` and ``receiver`` are the channel's own ends; each counts as open from its first use.
    Give them to a worker's call as arguments (every rank gets a clone, closed when its call ends),
    or use them here::

        with channel.sender as sender:
            await sender.put(Number(1))
    """

    def __init__(
        self,
        item_type: type[T] | UnionType,
        *,
        name: str,
        capacity: int = 64,
        max_weight: int | None = None,
        max_deliveries: int = 5,
    ) -> None:
        limits = {"capacity": capacity, "max_weight": max_weight, "max_deliveries": max_deliveries}
        for what, value in limits.items():
            if value is not None and value < 1:
                raise ValueError(f"channel {name!r}: {what} must be at least 1, got {value}")
        self.queue = Queue(item_type, name, capacity, max_weight, max_deliveries)
        self.sender: Sender[T] = LocalSender(self.queue)
        self.receiver: Receiver[T] = LocalReceiver(self.queue)

    @property
    def name(self) -> str:
        return self.queue.name

    @property
    def item_type(self) -> Any:
        return self.queue.item_type

    def new_sender(self) -> Sender[T]:
        """A sender of its own, for where ``sender`` was closed already."""
        return LocalSender(self.queue)

    def new_receiver(self) -> Receiver[T]:
        """A receiver of its own, for where ``receiver`` was closed already."""
        return LocalReceiver(self.queue)

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """Items that failed in every lease that took them, with the last error."""
        return self.queue.dead_letters

    def statistics(self) -> Statistics:
        """What the channel has seen so far."""
        return self.queue.statistics()

    def waits(self) -> list[Wait]:
        """Everybody who waits on this channel now, the oldest first."""
        return self.queue.waits()

    def close(self) -> None:
        """End the channel: nothing can be put any more; what is queued can still be taken."""
        self.queue.close()

    def fail(self, error: BaseException | str) -> None:
        """End the channel with an error: every waiting and later use of any end raises it."""
        self.queue.fail(error)

    def __repr__(self) -> str:
        seen = self.statistics()
        return f"<Channel {self.name!r} depth={seen.depth}/{seen.capacity}>"


class _LocalEnd:
    """The life of an end over a local queue. ``_live`` is what the fast path asks."""

    __slots__ = ("_holder", "_live", "_number", "_queue", "_spent")

    def __init__(self, queue: Queue, holder: str | None = None) -> None:
        self._queue = queue
        self._holder = holder
        self._number = 0
        self._live = False
        self._spent = False

    @property
    def number(self) -> int:
        """What the queue knows this open end by."""
        return self._number

    @property
    def queue(self) -> Queue:
        return self._queue

    @property
    def channel_name(self) -> str:
        return self._queue.name

    @property
    def item_type(self) -> Any:
        return self._queue.item_type

    async def statistics(self) -> Statistics:
        return self._queue.statistics()

    if TYPE_CHECKING:

        def _add(self, holder: str) -> int: ...

    def open(self) -> Self:
        if self._spent:
            raise self._closed()
        if not self._live:
            self._number = self._add(self._holder or current_party.get())
            self._live = True
        return self

    def _closed(self) -> ChannelClosed:
        return ChannelClosed(
            f"this {type(self).__name__.removeprefix('Local').lower()} of channel "
            f"{self._queue.name!r} was closed: go on with a new one, by the channel's "
            "new_sender() or new_receiver()"
        )

    def clone(self, holder: str | None = None) -> Self:
        if self._spent:
            raise self._closed()
        return type(self)(self._queue, holder or current_party.get()).open()


class LocalSender(_LocalEnd, Sender[T_contra]):
    """A sender of a channel in this process."""

    __slots__ = ()

    def _add(self, holder: str) -> int:
        return self._queue.add_sender(holder)

    async def put(self, item: T_contra, *, key: Key | None = None, weight: int = 1) -> None:
        queue = self._queue
        if not self._live:
            self.open()
        if item.__class__ is not queue.item_class:
            queue.check_item(item)
        wait = queue.start_put(item, key, weight, None, self._number)
        if wait is None:
            return
        try:
            await wait.future
        except BaseException:
            queue.abandon_put(wait)
            raise
        queue.finish_put(wait)

    def put_nowait(self, item: T_contra, *, key: Key | None = None, weight: int = 1) -> None:
        self.open()
        self._queue.check_item(item)
        if not self._queue.has_room(key, weight):
            raise ChannelFull(
                f"channel {self._queue.name!r} is full ({self._queue.capacity} items queued)"
            )
        self._queue.start_put(item, key, weight)

    def close(self) -> None:
        self._spent = True
        if self._live:
            self._live = False
            self._queue.remove_sender(self._number)

    def fail(self, error: BaseException | str) -> None:
        self._queue.fail(error)
        self.close()


class LocalReceiver(_LocalEnd, Receiver[T_co]):
    """A receiver of a channel in this process."""

    __slots__ = ()

    def _add(self, holder: str) -> int:
        return self._queue.add_receiver(holder)

    async def get(self, *, key: Key | None = None) -> T_co:
        if not self._live:
            self.open()
        queue = self._queue
        entry = queue.take_one(key)
        if entry is None:
            entry = (await self._entries(1, None, key))[0]
        if queue.decode is None:
            own: T_co = entry.item
            return own
        while queue.direct and not await bring(queue, key, [entry]):
            entry = (await self._entries(1, None, key))[0]
        item: T_co = queue.value_of(key, entry)
        return item

    def get_nowait(self, *, key: Key | None = None) -> T_co:
        self.open()
        entry = self._queue.take_one(key)
        if entry is None:
            raise self._queue.empty_error(key)
        if away_of(entry.item) is not None:
            self._queue.return_entries(key, [entry])
            start_ahead(self._queue, key)
            raise ChannelEmpty(
                f"channel {self._queue.name!r}: the next item is still on its way from its producer"
            )
        item: T_co = self._queue.value_of(key, entry)
        return item

    async def get_batch(
        self, *, weight: int, at_least: int | None = None, key: Key | None = None
    ) -> list[T_co]:
        self.open()
        entries = await self._entries(weight, at_least, key)
        while self._queue.direct and not await bring(self._queue, key, entries):
            entries = await self._entries(weight, at_least, key)
        return self._queue.values(key, entries)

    async def _entries(
        self, weight: int, at_least: int | None, key: Key | None, lent: list[int] | None = None
    ) -> list[Entry]:
        """Take entries; with ``lent``, under a lease whose number is added to it."""
        queue, owner = self._queue, asyncio.current_task()
        taken = queue.start_get(key, weight, at_least, None, self._number, owner)
        if not isinstance(taken, GetWait):
            if lent is not None:
                self._lend(key, taken, lent, owner)
            return taken
        try:
            entries = await taken.future
            if lent is not None:  # before others are told that all was taken
                self._lend(key, entries, lent, owner)
        except BaseException:
            queue.abandon_get(taken)
            raise
        finally:
            queue.finish_get(taken)
        return entries

    def _lend(self, key: Key | None, entries: list[Entry], lent: list[int], owner: object) -> None:
        lent.append(self._queue.grant(key, entries, current_party.get(), owner))

    async def _take(
        self, weight: int, at_least: int | None, key: Key | None
    ) -> tuple[int, Lease[T_co]]:
        self.open()
        lent: list[int] = []
        entries = await self._entries(weight, at_least, key, lent)
        while self._queue.direct and not await bring(self._queue, key, entries, lent[0]):
            lent.clear()
            entries = await self._entries(weight, at_least, key, lent)
        items: list[T_co] = self._queue.lend_values(lent[0], entries)
        return lent[0], Lease(items, [entry.deliveries for entry in entries])

    async def _acknowledge(self, lease: int) -> None:
        self._queue.acknowledge(lease)

    def _put_back(self, lease: int, error: BaseException) -> None:
        self._queue.put_back(lease, error)

    def _count_stale(self) -> None:
        self._queue.stale += 1

    def close(self) -> None:
        self._spent = True
        if self._live:
            self._live = False
            self._queue.remove_receiver(self._number)
