"""Channels whose queue lives in this process: an item is handed over by reference."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from rlinf_async.channels.encoded import ONE, check_key_and_weight, copies_of
from rlinf_async.channels.ends import (
    NO_REPLACEMENTS,
    Key,
    Lease,
    Receiver,
    Sender,
    checked_least,
    getting_task,
)
from rlinf_async.channels.errors import (
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelFull,
    LeaseLost,
    MalformedFrame,
    channel_failed,
)
from rlinf_async.channels.key_queue import (
    CHECKPOINT,
    Delivery,
    Entry,
    KeyQueue,
    Outcome,
    WaitingPut,
    paused,
)
from rlinf_async.channels.queue import Queue, state_of, statistics_of, waits_of
from rlinf_async.channels.remote_payload import PayloadLost, is_lost, remote_payload_of
from rlinf_async.channels.statistics import (
    DeadLetter,
    KeyState,
    Statistics,
    Wait,
    WaitFuture,
    current_party,
)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

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
        stealing: a key is a wish, not a route. A get takes what lies under its own key first, else
            the oldest item of any other key, as does a get without a key; so no item waits while
            any get does, and none is overtaken by more than 1,024 later ones. What a lease gives
            back lies under the key of the lease. A batch takes what is there (``at_least=1``), and
            nothing is sent to receivers in advance.

    ``sender`` and ``receiver`` are the channel's own ends; each counts as open from its first use.
    ``channel.sender.clone()`` makes another one, also where this one was closed already.
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
        stealing: bool = False,
    ) -> None:
        limits = {"capacity": capacity, "max_weight": max_weight, "max_deliveries": max_deliveries}
        for what, value in limits.items():
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"channel {name!r}: {what} must be a whole number from 1, got {value!r}"
                )
        self.queue = Queue(item_type, name, capacity, max_weight, max_deliveries, stealing)
        self.queue.channel = weakref.ref(self)
        self.sender: Sender[T] = LocalSender(self.queue, own=True)
        self.receiver: Receiver[T] = LocalReceiver(self.queue, own=True)

    @property
    def name(self) -> str:
        return self.queue.name

    @property
    def item_type(self) -> Any:
        return self.queue.item_type

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """Items that failed in every lease that took them, with the last error."""
        return self.queue.dead_letters

    async def statistics(self) -> Statistics:
        """What the channel has seen so far."""
        return statistics_of(self.queue)

    async def state(self, *, key: Key | None = None) -> KeyState:
        """How full this key is now: depth, room, weight."""
        check_key_and_weight(self.name, key, 1)
        return state_of(self.queue, key)

    def waits(self) -> list[Wait]:
        """Everybody who waits on this channel now, the oldest first."""
        return waits_of(self.queue)

    def close(self) -> None:
        """End the channel: nothing can be put any more; what is queued can still be taken."""
        self.queue.close()

    def fail(self, error: BaseException | str) -> None:
        """End the channel with an error: every waiting and later use of any end raises it."""
        self.queue.fail(error)

    def __repr__(self) -> str:
        seen = statistics_of(self.queue)
        return f"<Channel {self.name!r} depth={seen.depth}/{seen.capacity}>"


class _LocalEnd:
    """The life of an end over a local queue. ``_live`` is what the fast path asks.

    ``own``: whether it is the channel's own end, which lives as long as that. Any other that is
    dropped while it is open closes, with a `ResourceWarning` where the channel is still used.
    """

    __slots__ = (
        "_closed", "_failed", "_holder", "_live", "_loop", "_number", "_own", "_queue", "_unkeyed",
    )  # fmt: skip

    def __init__(self, queue: Queue, holder: str | None = None, *, own: bool = False) -> None:
        self._live = False
        self._queue = queue
        self._unkeyed = queue.unkeyed
        self._holder = holder
        self._own = own
        self._number = 0
        self._closed = False
        self._failed = False
        """whether it has failed its channel itself"""
        self._loop: asyncio.AbstractEventLoop | None = None

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
        self._check_open()
        return statistics_of(self._queue)

    async def state(self, *, key: Key | None = None) -> KeyState:
        self._check_open()
        check_key_and_weight(self._queue.name, key, 1)
        return state_of(self._queue, key)

    if TYPE_CHECKING:

        def _add(self, holder: str) -> int: ...

        @property
        def _remove(self) -> Callable[[int], None]: ...

    def open(self) -> Self:
        self._check_open()
        if not self._live:
            self._number = self._add(self._holder or current_party.get())
            self._live = True
            with contextlib.suppress(RuntimeError):  # no loop runs yet
                self._loop = asyncio.get_running_loop()
        return self

    def close(self) -> None:
        if not (self._live or self._closed):  # nothing was put, or got, but others wait for this
            with contextlib.suppress(ChannelError):  # the channel has ended
                self.open()
        self._closed = True
        if self._live:
            self._live = False
            self._remove(self._number)

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> ChannelError:
        if self._failed:
            return channel_failed(self._queue.name, self._queue.failure or ("", None))
        kind = type(self).__name__.removeprefix("Local").lower()
        return ChannelClosed(
            f"this {kind} of channel {self._queue.name!r} was closed: go on with another one, "
            f"channel.{kind}.clone()"
        )

    def clone(self, holder: str | None = None) -> Self:
        if not self._own:
            self._check_open()
        return type(self)(self._queue, holder or current_party.get()).open()

    async def _checkpoint(self) -> None:
        await asyncio.sleep(0)
        self._check_open()

    def __del__(self) -> None:
        if not self._live or self._own:
            return
        try:
            if self._queue.open and self._queue.channel() is not None:  # else no task waits for it
                self._warn()
        finally:
            self._close_later()

    def _close_later(self) -> None:
        """Close in a turn of the loop: the end may be dropped in any thread, within anything."""
        close = partial(self._remove, self._number)
        if self._loop is None:
            close()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(close)

    def _warn(self) -> None:
        warnings.warn(
            f"a {type(self).__name__.removeprefix('Local').lower()} of channel "
            f"{self._queue.name!r} was dropped while it was open, and is closed now: close() it, "
            "or use it in a with block",
            ResourceWarning,
            stacklevel=3,
            source=self,
        )


class LocalSender(_LocalEnd, Sender[T_contra]):
    """A sender of a channel in this process."""

    __slots__ = ()

    def _add(self, holder: str) -> int:
        return self._queue.add_sender(holder)

    @property
    def _remove(self) -> Callable[[int], None]:
        return self._queue.remove_sender

    async def put(self, item: T_contra, *, key: Key | None = None, weight: int = 1) -> None:
        if not self._live:
            self.open()
        channel = self._queue
        sequence = channel.sequence
        if sequence >= channel.put_turn:
            channel.put_turn = sequence + CHECKPOINT
            await self._checkpoint()
            sequence = channel.sequence
        if not channel.fits(item):
            channel.check_item(item)
        queue = self._unkeyed if key is None else channel.of_key(key)
        entries = queue.entries
        if (
            weight is ONE
            and channel.accepts
            and channel.max_weight is None
            and len(entries) + queue.reserved < channel.capacity
            and not (queue.putters or queue.getters.first or channel.indirect)
        ):  # as `KeyQueue.put`, of which this is most of the time, without a call
            channel.sequence = sequence = sequence + 1
            entries.append(Entry(item, weight, sequence))
            queue.weight += weight
            return
        wait = queue.put(item, weight, self._number, LocalPut)
        if wait is None:
            return
        try:
            await wait.future
        except BaseException:
            queue.cancel_put(wait)
            raise
        queue.put_waited(wait)

    def put_nowait(self, item: T_contra, *, key: Key | None = None, weight: int = 1) -> None:
        self.open()
        channel = self._queue
        channel.check_item(item)
        channel.check_put(key, weight)
        queue = channel.of_key(key)
        if queue.putters or not queue.has_room(weight):
            queue.recall_credit()
            raise ChannelFull(f"channel {channel.name!r} is full ({channel.capacity} items queued)")
        queue.put(item, weight, self._number, LocalPut)

    async def flush(self) -> None:
        self._check_open()

    def fail(self, error: BaseException | str) -> None:
        if not self._failed:
            self._check_open()
            self._queue.fail(error)
            self._failed = True
            self.close()


class LocalReceiver(_LocalEnd, Receiver[T_co]):
    """A receiver of a channel in this process."""

    __slots__ = ()

    def _add(self, holder: str) -> int:
        return self._queue.add_receiver(holder)

    @property
    def _remove(self) -> Callable[[int], None]:
        return self._queue.remove_receiver

    async def get(self, *, key: Key | None = None) -> T_co:
        if not self._live:
            self.open()
        channel = self._queue
        gets = channel.gets
        if gets >= channel.get_turn:
            channel.get_turn = gets + CHECKPOINT
            await self._checkpoint()
            gets = channel.gets
        queue = self._unkeyed
        entry: Entry | None = None
        if (
            key is None
            and (entries := queue.entries)
            and channel.failure is None
            and not (
                channel.direct
                or queue.putters
                or queue.getters.first
                or queue.prefetching
                or queue.room_wanted
                or channel.indirect
            )
        ):  # as `KeyQueue.take`, of which this is most of the time, without a call
            entry = entries.popleft()
            queue.weight -= entry.weight
            channel.gets = gets + 1
        elif channel.direct or channel.stealing:
            pass
        elif (known := channel.known(key)) and known.entries:
            entry = known.take(self._number)
        if entry is None:
            delivery = await self._deliver(1, 1, key, lease=False)
            [entry] = delivery.held()
            delivery.queue.settle(delivery, Outcome.TAKEN)
        item: T_co = entry.item if channel.decode is None else self._decoded(entry)
        return item

    def get_nowait(self, *, key: Key | None = None) -> T_co:
        self.open()
        channel = self._queue
        queue = channel.known(key)
        if channel.stealing:
            queue = channel.of_key(key)
            channel.steal(queue)
        if queue is not None and queue.entries and is_lost(queue.entries[0].item):
            channel.drop_lost()
            queue = channel.known(key)
        if (
            queue is not None
            and queue.entries
            and remote_payload_of(queue.entries[0].item) is not None
        ):
            load_ahead(queue)
            raise ChannelEmpty(
                f"channel {channel.name!r}: the next item is still on its way from its producer"
            )
        entry = None if queue is None else queue.take(self._number) or self._take_in_turn(queue)
        if entry is None:
            channel.forget(key)
            raise channel.empty_error(key)
        item: T_co = self._decoded(entry)
        return item

    def _take_in_turn(self, queue: KeyQueue) -> Entry | None:
        """Take an item although others wait, if none of them can take it: they were cancelled, or
        wait for what their own process must return."""
        if not queue.getters.first:
            return None
        delivery = LocalDelivery(queue, self._number, current_party.get(), None)
        if not queue.get_nowait(delivery) or delivery.future.exception() is not None:
            return None
        [entry] = delivery.held()
        if is_lost(entry.item):
            queue.settle(delivery, Outcome.LOST)
            return self._take_in_turn(queue)
        if remote_payload_of(entry.item) is not None:
            queue.settle(delivery, Outcome.RETURNED)
            load_ahead(queue)
            return None
        queue.settle(delivery, Outcome.TAKEN)
        return entry

    def _decoded(self, entry: Entry) -> Any:
        """An item that was taken; one that cannot be decoded is buried."""
        try:
            return self._queue.value(entry.item)
        except MalformedFrame as error:
            self._queue.dead_letter(entry, error)
            raise

    async def get_batch(
        self, *, weight: int, at_least: int | None = None, key: Key | None = None
    ) -> list[T_co]:
        self.open()
        least = checked_least(self._queue.name, weight, at_least, self._queue.stealing)
        return await self._batch(weight, least, key)

    async def _batch(self, weight: int, at_least: int, key: Key | None) -> list[Any]:
        delivery = await self._deliver(weight, at_least, key, lease=False)
        items = self._values(delivery, [entry.item for entry in delivery.held()])
        delivery.queue.settle(delivery, Outcome.TAKEN)
        return items

    async def _deliver(
        self, weight: int, at_least: int, key: Key | None, *, lease: bool
    ) -> LocalDelivery:
        """Wait for a delivery whose arrays are all in this process. It is not settled."""
        channel, task = self._queue, getting_task(self._queue.name)
        while True:
            channel.check_get()
            queue = channel.of_key(key)
            delivery = LocalDelivery(
                queue, self._number, current_party.get(), task, weight, at_least, lease
            )
            waits = queue.get(delivery)
            try:
                await delivery.future
                if not channel.direct or await load_payloads(delivery):
                    return delivery
            except BaseException:
                queue.cancel_get(delivery)
                raise
            finally:
                if waits:
                    queue.get_waited(delivery)

    def _values(self, delivery: LocalDelivery, items: list[Any]) -> list[Any]:
        """Return the items of a delivery, decoded; one that cannot be is buried, the others go
        back."""
        channel = self._queue
        if channel.decode is None:
            return items
        found: list[Any] = []
        for index, item in enumerate(items):
            try:
                found.append(channel.value(item))
            except MalformedFrame as error:
                delivery.queue.return_except(delivery, [index], Outcome.REJECTED, error)
                raise
        return found

    async def _take(
        self, weight: int, at_least: int | None, key: Key | None, *, confirmed: bool = True
    ) -> tuple[LocalDelivery, Lease[T_co]]:
        self.open()
        least = checked_least(self._queue.name, weight, at_least, self._queue.stealing)
        delivery = await self._deliver(weight, least, key, lease=True)
        entries = delivery.held()
        items: list[T_co] = self._values(delivery, await self._copies(delivery))
        return delivery, Lease(items, [entry.deliveries for entry in entries], self._checked)

    def _checked(self, item: object) -> object:
        """An item that may take the place of another."""
        self._queue.check_item(item)
        return item

    async def _copies(self, delivery: LocalDelivery) -> list[Any]:
        """The items of a lease, with arrays of their own: what its holder does to them before it
        fails must not be delivered again."""
        items = [entry.item for entry in delivery.held()]
        if self._queue.decode is None:
            return items
        try:
            return await copies_of(items)
        except BaseException:
            delivery.queue.cancel_get(delivery)
            raise

    async def _acknowledge(
        self, delivery: LocalDelivery, replacements: Mapping[int, Any] = NO_REPLACEMENTS
    ) -> None:
        if not delivery.unsettled:
            raise LeaseLost(
                f"a lease on channel {self._queue.name!r} was taken back before it was "
                "acknowledged: somebody else will get its items"
            )
        with paused([delivery.queue]):
            for index, item in replacements.items():
                delivery.queue.replace(delivery, index, item)
            delivery.queue.settle(delivery, Outcome.TAKEN)

    def _consume(self, delivery: LocalDelivery) -> None:
        delivery.queue.settle(delivery, Outcome.TAKEN)

    def _put_back(self, delivery: LocalDelivery, error: BaseException) -> None:
        delivery.queue.settle(delivery, Outcome.FAILED, error=error)

    def _count_stale(self) -> None:
        self._queue.stale += 1
