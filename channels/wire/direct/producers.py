"""The owner's side of payloads that stay with their producers. See `direct`.

An item whose large arrays are elsewhere is queued with a `RemotePayload` in their place. When
nothing refers to that any more, whatever became of the item, its producer is sent a release.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet, WeakValueDictionary

from rlinf_async.channels.encoded import Buffer, Encoded
from rlinf_async.channels.errors import ChannelError, MalformedFrame
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.remote_payload import PayloadLost, RemotePayload, remote_payload_of
from rlinf_async.channels.wire.direct.direct_protocol import (
    Fetch,
    Offer,
    Payload,
    PutAbandoned,
    Release,
    TakeOver,
    check_offer,
    check_payload,
    fits,
)
from rlinf_async.channels.wire.links.protocol import PayloadRef, RetainedPayload, Transfer
from rlinf_async.channels.wire.session.failures import RemoteError

if TYPE_CHECKING:
    from rlinf_async.channels.wire.session.answers import Reply, Request, Router
    from rlinf_async.channels.wire.session.connection import Connection

RELEASES_PER_MESSAGE = 4096
"""Numbers that one message releases."""


class Producer:
    """A process that retains payloads of items that are queued here."""

    def __init__(self, connection: Connection, offer: Offer) -> None:
        check_offer(offer)
        self.offer = offer
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._payloads: WeakValueDictionary[int, RemotePayload] = WeakValueDictionary()
        self._ends: dict[int, weakref.finalize[Any, RemotePayload]] = {}
        self._queues: WeakSet[Queue] = WeakSet()
        self._to_release: deque[int] = deque()
        self._scheduled = self._closed = False
        connection.on_close(self._lost)

    @classmethod
    def of(cls, connection: Connection) -> Self:
        """The producer at the other side of this connection.

        Raises:
            MalformedFrame: it has offered no payloads.
        """
        found = connection.attached(cls)
        if found is None:
            raise MalformedFrame("a payload stays with a process that has not offered any")
        return found

    def take(self, data: bytes, retained: RetainedPayload, queue: Queue) -> Encoded:
        """An item whose payload stays with this producer.

        Raises:
            MalformedFrame: too many arrays, or too many bytes, or a number that is in use.
        """
        check_payload(retained.sizes)
        number = retained.number
        if number in self._ends:
            raise MalformedFrame(f"payload {number} is retained already")
        fetch = partial(self._fetch, number, retained.sizes, queue)
        payload = RemotePayload(retained.sizes, (self, number), fetch, self._connection.peer)
        self._payloads[number] = payload
        self._ends[number] = end = weakref.finalize(payload, self._unreferenced, number)
        end.atexit = False
        self._queues.add(queue)
        queue.direct += 1
        return Encoded(data, payload)

    def find(self, number: int) -> RemotePayload | None:
        return self._payloads.get(number)

    def put_abandoned(self, number: int) -> None:
        """A put was given up. If its item has come, the payload is released with that; else now."""
        if number not in self._ends:
            self._unreferenced(number)

    def take_over(self) -> None:
        """The producer closes: load all of its payloads."""
        for payload in list(self._payloads.values()):
            payload.start_loading()

    # ---- inside

    async def _fetch(self, number: int, sizes: Sequence[int], queue: Queue) -> Sequence[Buffer]:
        question = Fetch(self.offer.token, number)
        try:
            reply, body = await self._connection.request("payload.fetch", question, reply=Payload)
        except (ChannelError, RemoteError) as error:
            raise PayloadLost(str(error)) from None
        if body is None or not reply.here or not fits(body, sizes):
            raise PayloadLost(f"{self._connection.peer} does not have them")
        queue.loaded += 1
        if (end := self._ends.get(number)) is not None:
            end()
        return body.buffers

    def _unreferenced(self, number: int) -> None:
        # Called in any thread, at any point: by a finalizer.
        self._to_release.append(number)
        if not (self._scheduled or self._closed):
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._send_releases)
            except RuntimeError:  # the loop is closed, and the connection with it
                self._closed = True

    def _send_releases(self) -> None:
        self._scheduled = False  # first: what goes from here on is said by the next call
        while self._to_release and not self._closed:
            count = min(len(self._to_release), RELEASES_PER_MESSAGE)
            numbers = [self._to_release.popleft() for _ in range(count)]
            for number in numbers:
                self._ends.pop(number, None)
            self._connection.notify("payload.release", Release(numbers), control=True)

    def _lost(self, connection: Connection, reason: str) -> None:
        self._closed = True
        for end in self._ends.values():
            end.detach()
        self._ends.clear()
        for payload in list(self._payloads.values()):
            payload.lost = payload.loaded is None
        for queue in list(self._queues):
            queue.drop_lost()


class Producers:
    """All processes that retain payloads of items that are queued here."""

    def __init__(self, router: Router) -> None:
        self._every: WeakSet[Producer] = WeakSet()
        router.add_sync("payload.offer", Offer, self._offer)
        router.add_sync("payload.unsure", PutAbandoned, self._put_abandoned)
        router.add_sync("payload.leave", TakeOver, self._take_over)
        router.add("payload.pass", Fetch, self._relay)

    def _offer(self, request: Request[Offer]) -> None:
        connection = request.connection
        if connection.attached(Producer) is None:
            producer = connection.attach(Producer(connection, request.meta))
            self._every.add(producer)

    def _put_abandoned(self, request: Request[PutAbandoned]) -> None:
        Producer.of(request.connection).put_abandoned(request.meta.number)

    def _take_over(self, request: Request[TakeOver]) -> None:
        Producer.of(request.connection).take_over()

    async def _relay(self, connection: Connection, asked: Fetch, body: Encoded | None) -> Reply:
        """Load a payload for a consumer that cannot reach its producer."""
        producers = [one for one in list(self._every) if one.offer.token == asked.token]
        for producer in producers:
            if (payload := producer.find(asked.number)) is not None:
                with contextlib.suppress(PayloadLost):
                    return Payload(True), Encoded(b"", await payload.wait_loaded())
        return Payload(False), None


def take_retained(
    connection: Connection,
    transfer: Transfer,
    items: list[Encoded],
    first: int,
    queue: Queue | None,
) -> list[int]:
    """Mark those of these items, numbered from ``first``, whose payload stays with the producer;
    the bytes of each payload. Without a queue they are released.

    Raises:
        MalformedFrame: there are no such items, or arrays.
    """
    producer, sizes = Producer.of(connection), list[int]()
    retained = {one.item: one for one in transfer.retained}
    if len(retained) != len(transfer.retained) or not all(
        0 <= item < len(transfer.sizes) for item in retained
    ):
        raise MalformedFrame("payloads were retained for items that did not come")
    for at, item in enumerate(items):
        one = retained.get(first + at)
        if one is None:
            continue
        if item.buffers:
            raise MalformedFrame("an item came with arrays, and with a payload that stays behind")
        if queue is None:
            producer.put_abandoned(one.number)
        else:
            items[at] = producer.take(item.data, one, queue)
            sizes.append(sum(one.sizes))
    return sizes


def without_payloads(parts: Sequence[Encoded]) -> tuple[list[Encoded], list[PayloadRef]]:
    """The items as they travel to their consumer, and the payloads that the consumer fetches."""
    found, left = list(parts), list[PayloadRef]()
    for index, part in enumerate(parts):
        payload = remote_payload_of(part)
        if payload is not None:
            producer, number = payload.where
            offer: Offer = producer.offer
            left.append(
                PayloadRef(
                    index, number, [*payload.sizes], offer.token, offer.host, offer.addresses
                )
            )
            found[index] = Encoded(part.data)
    return found, left
