"""The owner's side of getting: what was delivered to one process, until that has settled it.

A delivery is the answer to a request and has its number; its entries are numbered from 0. It is
settled by what the process says of it (`Taken`, `Settle`), by a cancellation that crosses the
answer, and by the loss of the connection::

    Get ---> [waits] ---> answered: requested entries, and some prefetched
                             |--Taken, Settle---> settled, entry by entry
                             |--CANCEL----------> returned
                             `--connection lost-> returned; under a lease that is to be
                                                  acknowledged: failed

A receiver that gets one by one, quickly, is sent items in advance of its next gets. They count as
queued. Only one receiver of a key has such items; as soon as anybody else waits they are recalled,
and nobody is served until they are settled: so each receiver sees a key in order. A process that
does not answer a recall for `RECALL_SECONDS`, because it stands still, holds up nobody but itself;
what it returns later comes to others as after a failed lease.

The next item with large arrays is copied to shared memory while its receiver is busy with the one
before, so that its get is answered at once. Until then it stays where it is, and is taken as it was
put::

    answered with a large item --next turn--> the head of its key is copied --get--> answered
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Final

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.ends import Key, checked_least
from rlinf_async.channels.errors import (
    ChannelError,
    ItemTooLarge,
    LeaseLost,
    MalformedFrame,
    WrongItemType,
)
from rlinf_async.channels.key_queue import (
    ChannelState,
    Delivery,
    Entry,
    KeyQueue,
    Outcome,
    paused,
)
from rlinf_async.channels.latest import Latest
from rlinf_async.channels.local import LocalReceiver, LocalSender
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.remote_payload import is_lost, remote_payload_of
from rlinf_async.channels.wire import frames as framing
from rlinf_async.channels.wire.codec import join, split
from rlinf_async.channels.wire.direct import without_payloads
from rlinf_async.channels.wire.frames import MAX_DATA_BYTES, SHARE_BYTES, check_sizes
from rlinf_async.channels.wire.protocol import (
    Delivered,
    EndKind,
    Get,
    Nothing,
    PayloadRef,
    Recall,
    Settle,
)
from rlinf_async.channels.wire.session.connection import Connection, Request
from rlinf_async.deadlines import Timer

READY_BYTES: Final = 16 * 1024**2
"""Larger items are copied when they are sent: they would hold others up, and take memory, for what
may not be asked for."""
CANNOT_TRAVEL: Final = (WrongItemType, ItemTooLarge)
"""What is wrong with an item that no other process will ever get: it is buried."""


def encoded_entry(entry: Entry, channel: ChannelState) -> Encoded:
    """An item as it travels; made now if it was not made ready.

    Raises:
        WrongItemType: it cannot travel.
        ItemTooLarge: no message can hold it.
    """
    ready: Encoded | None = entry.ready
    if ready is not None:
        entry.ready = None  # what comes back is not kept twice
        return ready
    item = entry.item
    if item.__class__ is Encoded:
        return item
    assert channel.encode is not None  # it is, once another process has an end
    body = channel.encode(item)
    if body.buffers or len(body.data) > MAX_DATA_BYTES:
        check_sizes(0, len(body.data), body.buffers, "an item")
    return body


def prepare_next(connection: Connection, queue: KeyQueue, sent: Encoded) -> None:
    """A receiver of this key was sent an item: make the next one ready, if it may be as large."""
    if sent.buffers and _worth_it(sent):
        asyncio.get_running_loop().call_soon(_prepare, connection, queue)


def _prepare(connection: Connection, queue: KeyQueue) -> None:
    if connection.closed or not queue.entries:
        return
    entry = queue.entries[0]
    if entry.ready is not None or remote_payload_of(entry.item) is not None:
        return
    try:
        body = encoded_entry(entry, queue.channel)
    except CANNOT_TRAVEL:  # the get that asks for it raises that
        return
    if _worth_it(body) and connection.prepare(body) and body is not entry.item:
        entry.ready = body


def _worth_it(body: Encoded) -> bool:
    return SHARE_BYTES <= sum(map(len, body.buffers)) <= READY_BYTES


class OpenEnd:
    """An end of a queue that another process uses."""

    __slots__ = ("holder", "kind", "lent_as", "number", "queue")

    def __init__(self, queue: Queue, kind: EndKind, holder: str) -> None:
        self.queue = queue
        self.kind: EndKind = kind
        self.holder = holder
        """who uses it, in reports"""
        add = queue.add_sender if kind == "sender" else queue.add_receiver
        self.number = add(holder)
        self.lent_as: tuple[int, ...] = ()
        """numbers under which others use it (see `homes`)"""

    def close(self) -> None:
        if self.kind == "sender":
            self.queue.remove_sender(self.number)
        else:
            self.queue.remove_receiver(self.number)


class LentEnd(OpenEnd):
    """An end of this process that another process uses in its place."""

    __slots__ = ("end",)

    def __init__(self, end: LocalSender[Any] | LocalReceiver[Any]) -> None:
        self.end = end.open()
        self.queue = end.queue
        self.kind = "sender" if isinstance(end, LocalSender) else "receiver"
        self.number = end.number
        ends = self.queue.senders if self.kind == "sender" else self.queue.receivers
        self.holder = ends[self.number]
        self.lent_as = ()

    def close(self) -> None:
        self.end.close()


class LatestEnd:
    """An end of a `Latest` that another process uses."""

    __slots__ = ("kind", "latest")

    def __init__(self, latest: Latest[Any], kind: EndKind) -> None:
        self.latest = latest
        self.kind: EndKind = kind

    def close(self) -> None:
        """A `Latest` does not count its ends."""


def channel_of(end: OpenEnd | LatestEnd | ChannelError) -> Queue | Latest[Any] | None:
    """The channel that an end belongs to; None for one that could not be opened."""
    if isinstance(end, OpenEnd):
        return end.queue
    return end.latest if isinstance(end, LatestEnd) else None


PREFETCH_BYTES: Final = framing.CHUNK_BYTES // 2
"""Bytes of items that are sent in advance with one answer."""
FAR_PREFETCH_BYTES: Final = 2 * 1024**2
"""most bytes of items in advance of one receiver, where the connection is `far`"""
PREFETCH_PAYLOADS: Final = 4
"""most items in advance whose payload is with its producer"""
MAX_PREFETCH: Final = 8192
"""Most items that are sent in advance with one answer."""
PREFETCH_ITEM_BYTES: Final = 32 * 1024
"""Larger items are not prefetched."""
ALONE_SECONDS: Final = 1.0
"""seconds without prefetching after another receiver waited for prefetched items"""
RECALL_SECONDS: Final = 0.25
"""Time after which others are served without what a process has not returned."""
NOTHING: Final = Nothing()
NO_LEFT: Final[list[PayloadRef]] = []
ONE: Final = 1
"""The answer that carries one item stands for `Delivered` with that item; a larger number, for so
many items that are one list."""


class RemoteDelivery(Delivery):
    """A delivery to another process, which asked for it with a request."""

    __slots__ = ("_prefetches", "queue", "request")

    def __init__(
        self, prefetches: Prefetches, request: Request[Get], queue: KeyQueue, receiver: int
    ) -> None:
        get = request.meta
        least = get.weight if get.at_least is None else get.at_least
        owner = (request.connection, get.task)
        super().__init__(receiver, get.party, owner, get.weight, least, get.lease)
        self._prefetches = prefetches
        self.queue = queue
        self.request = request

    @property
    def cancelled(self) -> bool:
        return self.request.connection.closed  # else it leaves its queue when it is cancelled

    def served(self) -> None:
        """Send its entries, and some in advance."""
        request, get = self.request, self.request.meta
        if request.abandon is not None:
            self.queue.get_waited(self)
        try:
            ahead = get.ahead > 0 and not get.lease and self._may_prefetch()
            if ahead and self._answer_with_list():
                return
            bodies = self._encoded()
            if ahead:
                self._prefetch(bodies)
            self._answer(bodies)
        except Exception as error:
            self.queue.settle(self, Outcome.RETURNED)
            request.fail(error)

    def refused(self, error: ChannelError) -> None:
        if self.request.abandon is not None:
            self.queue.get_waited(self)
        self.request.fail(error)

    def over(self) -> None:
        self.request.connection.peer_requests.unsettled.pop(self.request.number, None)

    # ---- its answer

    def _encoded(self) -> list[Encoded]:
        """The requested items as they travel. One that cannot travel is rejected.

        Raises:
            WrongItemType, ItemTooLarge: of that item.
        """
        found: list[Encoded] = []
        for index, entry in enumerate(self.held()):
            try:
                found.append(encoded_entry(entry, self.queue.channel))
            except CANNOT_TRAVEL as error:
                queue = self.queue
                queue.return_except(self, [index], Outcome.REJECTED, error)
                raise type(error)(f"channel {queue.channel.name!r}: {error}") from error
        return found

    def _may_prefetch(self) -> bool:
        """Whether there are items that nobody else waits for."""
        queue, get = self.queue, self.request.meta
        channel = queue.channel
        if not queue.entries or queue.getters.first or channel.failure is not None:
            return False
        if channel.stealing:  # another key's get could not have it
            return False
        prefetch = self._prefetches.get((get.end, get.key))
        if (prefetch is not None and prefetch.recalled) or any(
            other is not prefetch for other in queue.prefetching.values()
        ):
            return False
        return self.loop.time() - queue.contested >= ALONE_SECONDS

    def _answer_with_list(self) -> bool:
        """Answer with what is asked for and items in advance, as one list; whether that could be
        done: most are put by this process itself, and have no large arrays."""
        queue, get, far = self.queue, self.request.meta, self.request.connection.far
        encode_list = queue.channel.encode_list
        if encode_list is None:
            return False
        entries = [*self.held(), *islice(queue.entries, min(get.ahead, MAX_PREFETCH))]
        items = [entry.item for entry in entries]
        if Encoded in map(type, items) or entries[0].ready is not None:
            return False
        most = FAR_PREFETCH_BYTES if far else PREFETCH_BYTES
        listed = encode_list(items, most, most if far else PREFETCH_ITEM_BYTES)
        if listed is None:  # items of this channel have large arrays: encode them once, not twice
            queue.channel.encode_list = None
            return False
        if listed[0] < max(2, self.requested):
            return False
        count, data = listed
        if count > self.requested:
            self._take_ahead(count - self.requested)
        self.request.reply(count, Encoded(data), unsettled=self)
        queue.channel.edges.take(get.party, count, len(data), 0)
        return True

    def _take_ahead(self, count: int) -> None:
        """Send ``count`` entries in advance."""
        queue, end = self.queue, self.request.meta.end
        prefetch = self._prefetches.get((end, queue.key))
        if prefetch is None:
            prefetch = Prefetch(
                self._prefetches, self.request.connection, end, self.receiver, queue
            )
            self._prefetches[end, queue.key] = prefetch
        queue.prefetch(self, prefetch, count)

    def _prefetch(self, bodies: list[Encoded]) -> None:
        """Send small items in advance. Adds their bodies."""
        queue = self.queue
        size, payloads, before = 0, 0, len(bodies)
        far = self.request.connection.far
        most = FAR_PREFETCH_BYTES if far else PREFETCH_BYTES
        for entry in islice(queue.entries, min(self.request.meta.ahead, MAX_PREFETCH)):
            if entry.ready is not None and entry.ready.buffers and not far:  # it is large
                break
            try:
                body = encoded_entry(entry, queue.channel)
            except CANNOT_TRAVEL:  # the get that asks for it raises that
                break
            if not body.buffers:  # as most: without a detour
                length = len(body.data)
                if length > PREFETCH_ITEM_BYTES and not far:
                    break
                bodies.append(body)
                size += length
            else:
                elsewhere = remote_payload_of(entry.item) is not None
                if not (far or elsewhere):
                    break
                payloads += elsewhere
                bodies.append(body)
                size += len(body.data) if elsewhere else body.nbytes
            if size >= most or payloads >= PREFETCH_PAYLOADS:
                break
        if len(bodies) > before:
            self._take_ahead(len(bodies) - before)

    def _answer(self, bodies: list[Encoded]) -> None:
        request, channel = self.request, self.queue.channel
        nbytes, left = 0, NO_LEFT
        if channel.direct:
            nbytes = sum(body.nbytes for body in bodies)
            bodies, left = without_payloads(bodies)
        head: Delivered | int = ONE
        if len(bodies) == 1 and not left and not self.lease:
            body = bodies[0]
        else:
            counts = [entry.deliveries for entry in self.held()] if self.lease else []
            sizes, body = join(bodies)
            head = Delivered(sizes, counts, left)
        unsettled = self if bodies else None
        try:
            request.reply(head, body, unsettled=unsettled)
        except ItemTooLarge as error:
            raise ItemTooLarge(
                f"channel {channel.name!r}: {error}: ask for a smaller batch"
            ) from error
        if bodies:
            nbytes = nbytes or (body.nbytes if body.buffers else len(body.data))
            channel.edges.take(request.meta.party, len(bodies), nbytes, len(left))
            if body.buffers:
                prepare_next(request.connection, self.queue, body)

    # ---- for the connection

    def abandon(self) -> None:
        """Cancel the get: its request was given up before it was answered."""
        self.queue.cancel_get(self)
        self.queue.get_waited(self)

    def returned(self) -> None:
        """Return all entries: the request was given up after it was answered, and nothing was
        taken."""
        self.queue.settle(self, Outcome.RETURNED)

    def losing(self) -> AbstractContextManager[None]:
        """The process is gone. No get is served before all that was delivered to it is back."""
        return paused([self.queue])

    def lost(self, reason: str) -> None:
        if self.lease and self.request.meta.confirmed:
            why = f"{self.request.connection.peer} is gone: {reason}"
            self.queue.settle(self, Outcome.FAILED, error=why)
        else:
            self.queue.channel.unconfirmed += self.unsettled
            self.queue.settle(self, Outcome.RETURNED)


class Prefetch:
    """What one receiver has of one key in advance of its gets. It is there as long as that is
    anything. (A `PrefetchLink`.)"""

    def __init__(
        self, prefetches: Prefetches, connection: Connection, end: int, receiver: int,
        queue: KeyQueue,
    ) -> None:  # fmt: skip
        self._prefetches = prefetches
        self._connection = connection
        self._end = end
        self._receiver = receiver
        self._queue = queue
        self._timer: Timer | None = None
        self.overdue = False

    @property
    def recalled(self) -> bool:
        """Whether the prefetched items were recalled, and have not come back."""
        return self._timer is not None

    def recall(self, receiver: int = 0) -> None:
        connection, queue = self._connection, self._queue
        if receiver != self._receiver:
            queue.contested = Queue.now()
        if self._timer is None and not connection.closed:
            self._timer = Timer(RECALL_SECONDS, self._not_answered)
            connection.notify("delivery.recall", Recall(self._end, queue.key))

    def close(self) -> None:
        queue = self._queue
        with paused([queue]):
            for delivery, link in list(queue.prefetching.items()):
                if link is self:
                    queue.settle(delivery, Outcome.RETURNED, delivery.requested)

    def settled(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._prefetches.pop((self._end, self._queue.key), None)

    def _not_answered(self) -> None:
        self.overdue = True
        self._queue.serve()


Prefetches = dict[tuple[int, Key | None], Prefetch]
"""What one process has in advance, by receiver and key."""


def get(request: Request[Get], end: OpenEnd, prefetches: Prefetches) -> None:
    """Answer with what is asked for, now or when it is there; for a weight of 0, with what can be
    prefetched now."""
    asked, channel = request.meta, end.queue
    if asked.weight == 0 and not asked.lease:
        queue = channel.known(asked.key)
        if queue is None:
            request.reply(Delivered([]))
        else:
            RemoteDelivery(prefetches, request, queue, end.number).served()
        return
    if asked.weight != 1 or asked.at_least is not None:
        checked_least(channel.name, asked.weight, asked.at_least, channel.stealing)
    channel.check_get()
    queue = channel.of_key(asked.key)
    delivery = RemoteDelivery(prefetches, request, queue, end.number)
    if queue.get(delivery):
        request.abandon = delivery.abandon
    else:
        channel.forget(queue.key)


def taken(request: Request[Any]) -> None:
    """The process has what this `Taken`, or `Get`, says."""
    unsettled = request.connection.peer_requests.unsettled
    for number, first, count in request.meta.taken:
        delivery = unsettled.get(number)
        if isinstance(delivery, RemoteDelivery) and first >= 0 and count > 0:
            delivery.queue.settle(delivery, Outcome.TAKEN, first, count)


def settle(request: Request[Settle]) -> None:
    """Settle as the process says.

    Raises:
        LeaseLost: the lease that is acknowledged went back before.
    """
    asked, unsettled = request.meta, request.connection.peer_requests.unsettled
    found = [
        (delivery, first, count)
        for number, first, count in asked.ranges
        if isinstance(delivery := unsettled.get(number), RemoteDelivery)
        and first >= 0
        and count > 0
    ]
    if not found and request.number:
        raise LeaseLost(f"the lease is not held by {request.connection.peer}")
    replacements = _replacements(request)
    with paused([delivery.queue for delivery, _, _ in found]):
        for delivery, first, count in found:
            for index, item in replacements:
                delivery.queue.replace(delivery, index, item)
            outcome = _checked(asked, delivery, first, count)
            delivery.queue.settle(delivery, outcome, first, count, asked.error)
    request.reply(NOTHING)


def _replacements(request: Request[Settle]) -> list[tuple[int, Encoded]]:
    """The items that go back in the place of entries, with the indices of those.

    Raises:
        MalformedFrame: they are not what the message says.
    """
    settle = request.meta
    if not settle.replaced:
        return []
    if (
        len(settle.ranges) != 1
        or len(settle.replaced) != len(settle.sizes)
        or min(settle.replaced) < 0
    ):
        raise MalformedFrame("the replacements of a lease do not match its entries")
    return list(zip(settle.replaced, split(settle.sizes, request.body), strict=True))


def _checked(settle: Settle, delivery: RemoteDelivery, first: int, count: int) -> Outcome:
    """The outcome, as far as it can be believed."""
    outcome = Outcome(settle.outcome)
    if outcome is Outcome.FAILED and not delivery.lease:
        return Outcome.RETURNED
    if outcome is Outcome.LOST:
        entries: list[Entry | None] = delivery.entries[first : first + count]
        if not all(entry is None or is_lost(entry.item) for entry in entries):
            return Outcome.RETURNED
    return outcome
