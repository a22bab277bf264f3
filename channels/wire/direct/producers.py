"""The owner's side of large arrays that stay with their producers. See `direct`.

An item whose arrays are elsewhere is queued with an `Away` in their place. When nothing refers to
that any more, whatever became of the item, its producer is told to let go of them.
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
from rlinf_async.channels.remote_payload import Away, PayloadLost, away_of
from rlinf_async.channels.wire.direct.direct_protocol import (
    Fetch,
    Leave,
    Offer,
    Payload,
    Release,
    Unsure,
    check_kept,
    check_offer,
    fits,
)
from rlinf_async.channels.wire.links.protocol import Kept, Left, Transfer
from rlinf_async.channels.wire.session.failures import RemoteError

if TYPE_CHECKING:
    from rlinf_async.channels.wire.session.connection import Connection
    from rlinf_async.channels.wire.session.router import Reply, Request, Router

AT_ONCE = 4096
"""Numbers that one message releases."""


class Source:
    """A process that keeps arrays of items that are queued here."""

    def __init__(self, connection: Connection, offer: Offer) -> None:
        check_offer(offer)
        self.offer = offer
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._away: WeakValueDictionary[int, Away] = WeakValueDictionary()
        self._ends: dict[int, weakref.finalize[Any, Away]] = {}
        self._queues: WeakSet[Queue] = WeakSet()
        self._gone: deque[int] = deque()
        self._scheduled = self._closed = False
        connection.on_close(self._lost)

    @classmethod
    def of(cls, connection: Connection) -> Self:
        """That of this connection.

        Raises:
            MalformedFrame: it has offered nothing.
        """
        found = connection.attached(cls)
        if found is None:
            raise MalformedFrame("arrays stay with a process that did not say where it is")
        return found

    def take(self, data: bytes, kept: Kept, queue: Queue) -> Encoded:
        """An item whose arrays stay there.

        Raises:
            MalformedFrame: they cannot be so many, or so large.
        """
        check_kept(kept.sizes)
        number = kept.number
        if number in self._ends:
            raise MalformedFrame(f"arrays {number} are kept already")
        fetch = partial(self._fetch, number, kept.sizes, queue)
        away = Away(kept.sizes, (self, number), fetch, self._connection.peer)
        self._away[number] = away
        self._ends[number] = end = weakref.finalize(away, self._let_go, number)
        end.atexit = False
        self._queues.add(queue)
        queue.direct += 1
        return Encoded(data, away)

    def find(self, number: int) -> Away | None:
        return self._away.get(number)

    def unsure(self, number: int) -> None:
        """Its put was given up. If it came, it is released with its item; else now."""
        if number not in self._ends:
            self._let_go(number)

    def leave(self) -> None:
        """It ends: have its arrays come here."""
        for away in list(self._away.values()):
            away.start()

    # ---- inside

    async def _fetch(self, number: int, sizes: Sequence[int], queue: Queue) -> Sequence[Buffer]:
        question = Fetch(self.offer.token, number)
        try:
            reply, body = await self._connection.request("payload.fetch", question, reply=Payload)
        except (ChannelError, RemoteError) as error:
            raise PayloadLost(str(error)) from None
        if body is None or not reply.here or not fits(body, sizes):
            raise PayloadLost(f"{self._connection.peer} does not have them")
        queue.brought += 1
        if (end := self._ends.get(number)) is not None:
            end()
        return body.buffers

    def _let_go(self, number: int) -> None:
        # In any thread, and within anything that this thread is doing.
        self._gone.append(number)
        if not (self._scheduled or self._closed):
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._say)
            except RuntimeError:  # the loop is closed: nobody is there to be told
                self._closed = True

    def _say(self) -> None:
        self._scheduled = False  # first: what goes from here on is said by the next call
        while self._gone and not self._closed:
            numbers = [self._gone.popleft() for _ in range(min(len(self._gone), AT_ONCE))]
            for number in numbers:
                self._ends.pop(number, None)
            self._connection.notify("payload.release", Release(numbers), control=True)

    def _lost(self, connection: Connection, reason: str) -> None:
        self._closed = True
        for end in self._ends.values():
            end.detach()
        self._ends.clear()
        for away in list(self._away.values()):
            away.lost = away.brought is None
        for queue in list(self._queues):
            queue.drop_lost()


class Sources:
    """All processes that keep arrays of items that are queued here."""

    def __init__(self, router: Router) -> None:
        self._every: WeakSet[Source] = WeakSet()
        router.add_sync("payload.offer", Offer, self._offer)
        router.add_sync("payload.unsure", Unsure, self._unsure)
        router.add_sync("payload.leave", Leave, self._leave)
        router.add("payload.pass", Fetch, self._pass)

    def _offer(self, request: Request[Offer]) -> None:
        connection = request.connection
        if connection.attached(Source) is None:
            source = connection.attach(Source(connection, request.meta))
            self._every.add(source)

    def _unsure(self, request: Request[Unsure]) -> None:
        Source.of(request.connection).unsure(request.meta.number)

    def _leave(self, request: Request[Leave]) -> None:
        Source.of(request.connection).leave()

    async def _pass(self, connection: Connection, asked: Fetch, body: Encoded | None) -> Reply:
        """Somebody cannot reach their producer."""
        known = [one for one in list(self._every) if one.offer.token == asked.token]
        for source in known:
            if (away := source.find(asked.number)) is not None:
                with contextlib.suppress(PayloadLost):
                    return Payload(True), Encoded(b"", await away.bring())
        return Payload(False), None


def take_kept(
    connection: Connection,
    transfer: Transfer,
    items: list[Encoded],
    first: int,
    queue: Queue | None,
) -> list[int]:
    """Those of these items, numbered from ``first``, whose arrays stay with their producer, say so
    from now on; the bytes of each one's. Without a queue nobody will want them.

    Raises:
        MalformedFrame: there are no such items, or arrays.
    """
    source, sizes = Source.of(connection), list[int]()
    kept = {one.item: one for one in transfer.kept}
    if len(kept) != len(transfer.kept) or not all(0 <= item < len(transfer.sizes) for item in kept):
        raise MalformedFrame("arrays stay with their producer, of items that did not come")
    for at, item in enumerate(items):
        one = kept.get(first + at)
        if one is None:
            continue
        if item.buffers:
            raise MalformedFrame("an item has arrays here and arrays that stay with its producer")
        if queue is None:
            source.unsure(one.number)
        else:
            items[at] = source.take(item.data, one, queue)
            sizes.append(sum(one.sizes))
    return sizes


def leave_out(parts: Sequence[Encoded]) -> tuple[list[Encoded], list[Left]]:
    """The items as they travel to who gets them, and the arrays that he has to fetch."""
    found, left = list(parts), list[Left]()
    for index, part in enumerate(parts):
        away = away_of(part)
        if away is not None:
            source, number = away.where
            offer: Offer = source.offer
            left.append(
                Left(index, number, [*away.sizes], offer.token, offer.host, offer.addresses)
            )
            found[index] = Encoded(part.data)
    return found, left
