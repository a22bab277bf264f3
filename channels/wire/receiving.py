"""Getting from channels of another process: the receivers, and what was sent to them in advance.

Single items come by a `ReceiverLink`, batches and leases by asking.

::

    get --prefetched here--> taken --next write--> Taken: settled
     \\--none here---> Get --answer: the item, and some for the next gets--> taken, or kept here
    half of them taken ---> Get of weight 0 --answer: what is there now--> kept here

Invariants:

* what is here and was not taken belongs to the channel: it is returned when the owner recalls
  it, when a batch or a lease is asked for, when this end closes, and when this process dies;
* everything that arrives, arrives in the order of the key, and is handed to the gets that wait, in
  their order. What was prefetched before a recall has arrived before it. Where older items went
  back meanwhile, what was on its way goes back, too, and comes after them;
* each get that waits has asked the owner by itself, so that it stands there in its turn, unless
  prefetched items are on their way. One that is served by another one's answer gives its request
  up;
* only a receiver that takes one item after the other quickly is sent any in advance: as many as it
  takes in a few milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from rlinf_async.channels.encoded import Encoded, check_key_and_weight
from rlinf_async.channels.ends import (
    NO_REPLACEMENTS,
    Key,
    Lease,
    Receiver,
    checked_least,
    getting_task,
)
from rlinf_async.channels.errors import (
    ChannelClosed,
    ConnectionLost,
    LeaseLost,
    MalformedFrame,
    error_text,
)
from rlinf_async.channels.key_queue import Outcome
from rlinf_async.channels.remote_payload import RemotePayload
from rlinf_async.channels.statistics import WaitFuture, current_party
from rlinf_async.channels.wire import protocol
from rlinf_async.channels.wire.codec import DecodeList, join, split
from rlinf_async.channels.wire.direct import attach, fetch_ahead, fetch_all
from rlinf_async.channels.wire.frames import Message
from rlinf_async.channels.wire.protocol import Delivered, Get, Range, Recall, Settle, Taken
from rlinf_async.channels.wire.remote_ends import RemoteEnd, Wire
from rlinf_async.channels.wire.session.connection import Connection, Request
from rlinf_async.channels.wire.session.requests import head_of

HORIZON: Final = 0.005
"""Seconds: what is taken in this time, and in two round trips, is prefetched."""
STREAK: Final = 4
"""Gets in a row that must be so quick before anything is prefetched."""
MAX_AHEAD: Final = 512
FIRST_AHEAD: Final = 8
FIRST_FAR_AHEAD: Final = 64
MAX_FAR_AHEAD: Final = 8192
"""Largest number of items in advance, where the connection is `far`."""
FAR_REQUESTS: Final = 8
"""Largest number of unanswered requests for prefetched items, where the connection is `far`."""
LARGE_ANSWER_BYTES: Final = 64 * 1024
"""An answer of this size may have been cut short: the channel may have more items."""
FETCHED_AHEAD: Final = 1
"""Payloads, of items that are prefetched, that are fetched before a caller asks for the item."""
TURN_ITEMS: Final = 128
"""items that are taken in a row before the loop has a turn"""
MAX_LINKS: Final = 256
"""number of links, or twice those in use when that was done last, at which idle ones are forgotten
before another is made"""
_decode_delivered = msgspec.msgpack.Decoder(Delivered | int).decode

Part = tuple[int, int, Any]
"""An item, behind the number of its delivery and its index there: `Encoded`, or as it is handed
out."""


class WaitingGet:
    """A get that waits: its task awaits the future, its request is answered by a message."""

    def __init__(self, link: ReceiverLink) -> None:
        self.link = link
        self.future = future = WaitFuture(loop=link.links.loop)
        self.serve: Callable[[Part], None] = future.set_result
        """gives the get its item"""
        self.set_exception, self.done = future.set_exception, future.done
        self.number = 0
        """number of the request; 0 where the get has not asked, or was answered"""
        self.party = current_party.get()
        self.task = id(getting_task(link.channel))
        self.reports_taken = False
        """whether its request says beside what was taken"""

    def set_result(self, message: Message) -> None:
        """Take the answer to the request: it serves those who wait, oldest first."""
        self.number = 0
        try:
            self.link.arrived(message, self)
        except MalformedFrame as error:  # the connection ends by it, but forgot who waits
            self.set_exception(error)
            raise


class _PrefetchRequest:
    """A request for prefetched items alone, whose answer no get awaits."""

    def __init__(self, link: ReceiverLink) -> None:
        self._link = link

    def done(self) -> bool:
        return False

    def set_result(self, message: Message) -> None:
        self._link.prefetch_arrived(message)

    def set_exception(self, error: BaseException) -> None:
        """The end is closed, or the connection is lost: the next get raises that."""
        self._link.prefetch_over()


class ReceiverLink:
    """One receiver and one key: what was prefetched, and the gets that wait."""

    __slots__ = (
        "_asked", "_decode_list", "_discard_up_to", "_far", "_low", "_since", "_size", "_streak",
        "_taken", "channel", "closed", "end", "items", "key", "links", "prefetch_pending",
        "registered", "run", "waiting",
    )  # fmt: skip

    def __init__(
        self, links: ReceiverLinks, channel: str, end: int, key: Key | None,
        decode_list: DecodeList | None,
    ) -> None:  # fmt: skip
        self.links = links
        self.channel = channel
        """name of the channel"""
        self.end = end
        self.key = key
        self._decode_list = decode_list
        self.items: deque[Part] = deque()
        self.waiting: deque[WaitingGet] = deque()
        self.prefetch_pending = 0
        """requests for prefetched items that are not answered"""
        self.closed = False
        self.registered = False
        """whether it is found when its items are recalled"""
        self.run = 0
        """items that were taken since the loop had a turn"""
        self._since = float("-inf")  # when it last had waited
        self._taken = 0
        self._streak = 0
        self._size = 0
        self._low = -1  # with so few left, more are asked for
        self._far = False  # whether several requests may be unanswered at a time
        self._asked = 0  # number of the newest request
        self._discard_up_to = 0  # what was asked up to this one comes after items that went back

    @property
    def idle(self) -> bool:
        return not (self.items or self.waiting or self.prefetch_pending)

    # ---- getting

    async def next(self) -> Part:
        """Wait for an item. Cancelled, it leaves the item in the channel."""
        links = self.links
        get = WaitingGet(self)
        if not self.prefetch_pending:
            self._ask(get, 0 if self.waiting else self._ahead())
        self.waiting.append(get)
        try:
            part: Part = await get.future
        except BaseException:
            self._abandon(get)
            raise
        self._since, self._taken = links.now(), 0
        if links.connection.closed:  # it has gone back, and others may have it
            raise links.connection.lost_as(f"connection to {links.connection.peer!r} was lost")
        if self.closed:  # the owner may have taken it back
            links.settle([(part[0], part[1], 1)], Outcome.RETURNED)
            raise ChannelClosed("this receiver was closed while it waited")
        return part

    def mark_taken(self, number: int, index: int) -> None:
        """A caller has this item."""
        self.run += 1
        self._taken += 1
        links, items = self.links, self.items
        if links.taken_of == number and links.taken_to == index:  # the next of a delivery: most are
            links.taken_to = index + 1
        else:
            links.taken(number, index)
        if items and (part := items[0][2]).__class__ is Encoded and part.buffers:
            self._fetch_ahead()
        if len(items) <= self._low:
            self._low = -1
            self._ask_for_prefetch()

    def return_part(self, part: Part) -> None:
        """The caller did not take this item after all."""
        if not self.links.connection.closed:
            self.items.appendleft(part)
            self.return_items()

    def return_items(self) -> None:
        """Return all items that are here: none will be taken."""
        self._low, self._size, self._streak = -1, 0, 0
        if self.items:
            self.discard_in_flight()
            items, self.items = self.items, deque()
            self.links.settle(_ranges(items), Outcome.RETURNED)

    def discard_in_flight(self) -> None:
        """Items go back that are older than what is on its way."""
        self._discard_up_to = self._asked

    # ---- what arrives

    def arrived(self, message: Message, get: WaitingGet) -> None:
        """The answer to this get."""
        parts = self._parts(message)
        waiting = self.waiting
        if message.number <= self._discard_up_to and not self.closed and not get.done():
            self.links.settle(_ranges(parts), Outcome.RETURNED)
            self._ask(get, 0)
            return
        if len(parts) == len(waiting) == 1 and waiting[0] is get and not (self.items or get.done()):
            waiting.clear()  # as below, without a detour
            get.serve(parts[0])
            return
        if self.closed:
            del parts[1:]  # the owner has taken back what was prefetched
        if get in waiting and get is not waiting[0]:
            waiting.remove(get)  # so no get is left waiting without a request
            waiting.appendleft(get)
        if len(parts) > 1:
            self._low = self._mark(len(parts))
        self._received(parts)

    def prefetch_arrived(self, message: Message) -> None:
        """The answer to a request for prefetched items."""
        parts = self._parts(message)
        if self.closed:
            parts.clear()  # the owner has taken them back
        elif message.number <= self._discard_up_to and parts:
            self.links.settle(_ranges(parts), Outcome.RETURNED)
            parts.clear()
        nbytes = 0 if message.body is None else message.body.nbytes
        if parts and (2 * len(parts) >= self._size or nbytes >= LARGE_ANSWER_BYTES):
            self._low = self._mark(len(self.items) + len(parts))
        self._received(parts)
        self.prefetch_over()

    def prefetch_over(self) -> None:
        """A request for prefetched items is answered. After the last one, waiting gets must ask."""
        self.prefetch_pending -= 1
        if self.prefetch_pending:
            return
        for get in list(self.waiting):
            if not get.number and not get.done():
                try:
                    self._ask(get, 0)
                except ConnectionLost as error:
                    get.set_exception(error)

    # ---- inside

    def _mark(self, here: int) -> int:
        """The number of items left at which more are requested, of ``here`` that arrived."""
        return here - 1 if self._far else here // 2

    def _received(self, parts: list[Part]) -> None:
        self.items.extend(parts)
        while self.waiting and self.items:
            get = self.waiting.popleft()
            if get.number:
                self.links.give_up(get)
            if not get.done():
                get.serve(self.items.popleft())
        self._fetch_ahead()
        if self.closed:
            self.return_items()

    def _fetch_ahead(self) -> None:
        """Fetch the payloads of the next items, while a caller works on the one before."""
        for _, _, part in islice(self.items, FETCHED_AHEAD):
            if part.__class__ is not Encoded or part.buffers.__class__ is not RemotePayload:
                return
            fetch_ahead(self.links.connection, part)

    def _ask(self, get: WaitingGet, ahead: int) -> None:
        taken = self.links.take_unreported()
        get.reports_taken = bool(taken)
        question = Get(self.end, self.key, 1, None, get.party, get.task, False, ahead, taken)
        head = head_of("channel.get", question)
        get.number = self._asked = self.links.connection.post(get, "channel.get", head)

    def _parts(self, message: Message) -> list[Part]:
        number = message.number
        try:
            delivered = _decode_delivered(message.head)
            if isinstance(delivered, int):
                if delivered == 1:
                    return [(number, 0, message.body or Encoded(b""))]
                return self._listed(number, delivered, message.body)
            bodies = split(delivered.sizes, message.body)
            if delivered.payloads:
                attach(bodies, delivered.payloads)
            return [(number, index, body) for index, body in enumerate(bodies)]
        except msgspec.DecodeError as error:
            raise MalformedFrame(f"the answer to a get: {error}") from error

    def _listed(self, number: int, count: int, body: Encoded | None) -> list[Part]:
        """The items of a list, as they are handed out: decoded together."""
        if self._decode_list is None or body is None:
            raise MalformedFrame("a list of items on a channel that has none")
        items = self._decode_list(body.data)
        if len(items) != count:
            raise MalformedFrame(f"a list of {count} items has {len(items)}")
        return [(number, index, item) for index, item in enumerate(items)]

    def _abandon(self, get: WaitingGet) -> None:
        if get in self.waiting:
            self.waiting.remove(get)
        if not get.done() or get.future.cancelled():
            if get.number:
                self.links.give_up(get)
        elif get.future.exception() is None:
            self.return_part(get.future.result())

    def _ahead(self) -> int:
        """How many items may be prefetched: as many as are taken soon."""
        used = self.links.now() - self._since  # without what it waited: that says nothing of it
        pace = max(used, 1e-9) / max(1, self._taken)
        self._far = self.links.connection.far
        horizon = HORIZON + 2 * self.links.connection.round_trip
        first, most = (FIRST_FAR_AHEAD, MAX_FAR_AHEAD) if self._far else (FIRST_AHEAD, MAX_AHEAD)
        if pace > horizon:
            self._streak = self._size = 0
            return 0
        self._streak += 1
        if self._streak < STREAK:
            return 0
        self._size = min(most, 2 * self._size + first, int(horizon / pace))
        return self._size

    def _ask_for_prefetch(self) -> None:
        if self.waiting or self.closed or not self.links.register(self):
            return
        if self.prefetch_pending >= (FAR_REQUESTS if self._far else 1):
            return
        ahead = self._ahead()
        while ahead and self.prefetch_pending < (FAR_REQUESTS if self._far else 1):
            self.prefetch_pending += 1
            more = Get(self.end, self.key, 0, 0, current_party.get(), 0, False, ahead)
            self._asked = self.links.connection.post(
                _PrefetchRequest(self), "channel.get", head_of("channel.get", more)
            )


class ReceiverLinks:
    """Receiver links of one connection, and what they say of deliveries. See `of`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self._links: dict[int, dict[Key | None, ReceiverLink]] = {}
        """links by receiver, then by key"""
        self._count = 0
        self._forget_at = MAX_LINKS
        self._unreported: list[Range] = []
        self.taken_of = self._taken_from = self.taken_to = 0
        """number of the delivery of which entries were taken last; 0 if none were"""
        self._due = False
        connection.peer_requests.own.add_sync("delivery.recall", Recall, self._recalled)
        connection.on_close(self._lost, first=True)

    @classmethod
    def of(cls, connection: Connection) -> ReceiverLinks:
        """Return the links of a connection."""
        return connection.attached(cls) or connection.attach(cls(connection))

    def find(
        self, channel: str, end: int, key: Key | None, decode_list: DecodeList | None
    ) -> ReceiverLink:
        """Return the link of a receiver and key, made if there is none. ``channel``: its name;
        ``decode_list``: of its items, as of `ItemCodec`."""
        link = self._find(end, key)
        if link is None:
            if self._count >= self._forget_at:
                self._forget_idle()
            link = ReceiverLink(self, channel, end, key, decode_list)
            self.register(link)
        return link

    def close(self, end: int) -> None:
        """Return what is here for a receiver that is closed."""
        links = self._links.pop(end, {})
        self._count -= len(links)
        for link in links.values():
            link.closed = True
            link.return_items()
            link.registered = False

    def return_items(self, end: int, key: Key | None) -> None:
        """A batch or a lease is asked for: what was prefetched must be in the channel."""
        link = self._find(end, key)
        if link is not None:
            link.return_items()

    def register(self, link: ReceiverLink) -> bool:
        """Find it from now on, if it was forgotten; whether it is still that of its key. Only such
        a one may have items prefetched: they must be found when they are recalled."""
        if not link.registered:
            links = self._links.setdefault(link.end, {})
            if link.key not in links:
                links[link.key] = link
                link.registered = True
                self._count += 1
        return link.registered

    # ---- settling

    def taken(self, number: int, index: int, count: int = 1) -> None:
        """Settle entries as taken. It is reported with the next get that asks the owner, or with
        the next write."""
        if self.taken_of == number and self.taken_to == index:
            self.taken_to = index + count
            return
        self._close_run()
        self.taken_of, self._taken_from, self.taken_to = number, index, index + count
        if not self._due:
            self._due = True
            self.connection.outbox.collect(self._report_taken)

    def take_unreported(self) -> list[Range]:
        """What was taken and not reported: to be sent now."""
        self._close_run()
        unreported, self._unreported = self._unreported, []
        return unreported

    def _close_run(self) -> None:
        """What is taken next is not the entry behind the last one."""
        if self.taken_of:
            first = self._taken_from
            self._unreported.append((self.taken_of, first, self.taken_to - first))
            self.taken_of = 0

    def settle(
        self, ranges: list[Range], outcome: Outcome, error: BaseException | str = ""
    ) -> None:
        """Settle entries otherwise, after what was taken before. To a lost owner there is nothing
        to say."""
        if not self.connection.closed:
            self._report_taken()
            self.connection.notify(
                "delivery.settle", Settle(ranges, outcome, error_text(error) if error else "")
            )

    def give_up(self, get: WaitingGet) -> None:
        """Give up the request of a get."""
        number, get.number = get.number, 0
        if not self.connection.give_up(number, withdraw=not get.reports_taken):
            get.link.discard_in_flight()  # the owner may have answered it: that goes back

    # ---- inside

    def _report_taken(self) -> None:
        self._due = False
        if (taken := self.take_unreported()) and not self.connection.closed:
            self.connection.notify("delivery.taken", Taken(taken))

    def _recalled(self, request: Request[Recall]) -> None:
        self.return_items(request.meta.end, request.meta.key)

    def _find(self, end: int, key: Key | None) -> ReceiverLink | None:
        links = self._links.get(end)
        return None if links is None else links.get(key)

    def _every_link(self) -> list[ReceiverLink]:
        return [link for links in self._links.values() for link in links.values()]

    def _forget_idle(self) -> None:
        """Forget those that are idle, and do so again when there are twice as many as are left."""
        for link in self._every_link():
            if link.idle:
                link.registered = False
                self._count -= 1
                links = self._links[link.end]
                del links[link.key]
                if not links:
                    del self._links[link.end]
        self._forget_at = max(MAX_LINKS, 2 * self._count)

    def _lost(self, connection: Connection, reason: str) -> None:
        for link in self._every_link():
            link.items.clear()
        self.taken_of = 0
        self._unreported.clear()


def _ranges(parts: Iterable[Part]) -> list[Range]:
    """The places of these items, joined where they lie side by side."""
    found: list[Range] = []
    for number, index, _ in parts:
        if found and (last := found[-1])[0] == number and last[1] + last[2] == index:
            found[-1] = number, last[1], last[2] + 1
        else:
            found.append((number, index, 1))
    return found


T_co = TypeVar("T_co", covariant=True)
DELIVERED: Any = protocol.Delivered | int


class RemoteReceiver(RemoteEnd, Receiver[T_co]):
    """A receiver of a channel in another process."""

    __slots__ = ("_link", "_links")

    def _join(self) -> None:
        self._links = ReceiverLinks.of(self._wire.connection)
        self._link = self._find(None)

    async def get(self, *, key: Key | None = None) -> T_co:
        if self._closed:
            self.open()
        if key is not None:
            check_key_and_weight(self.channel_name, key, 1)
        link = self._link if key is None else self._find(key)
        if link.run >= TURN_ITEMS:
            link.run = 0
            await asyncio.sleep(0)  # what was taken is said, and what was asked for is heard
            self.open()
        if not link.registered:
            link = self._find(key)
        number, index, item = link.items.popleft() if link.items else await link.next()
        while item.__class__ is Encoded:
            if item.buffers.__class__ is RemotePayload and not await self._is_here(
                link, number, index, item
            ):
                number, index, item = link.items.popleft() if link.items else await link.next()
                continue
            try:
                item = self._wire.decode(item)
            except MalformedFrame as error:
                self._links.settle([(number, index, 1)], Outcome.REJECTED, error)
                raise self._wire.unreadable(error) from error
            break
        link.mark_taken(number, index)
        taken: T_co = item
        return taken

    async def _is_here(self, link: ReceiverLink, number: int, index: int, part: Encoded) -> bool:
        """Fetch the arrays of an item; False if they are lost. Cancelled, it goes back."""
        wire = self._wire
        try:
            lost = await fetch_all(wire.connection, wire.direct, [part])
        except BaseException:
            link.return_part((number, index, part))
            raise
        if lost:
            self._links.settle([(number, index, 1)], Outcome.LOST)
        return not lost

    def _find(self, key: Key | None) -> ReceiverLink:
        """The link as it is known now: one that was forgotten is empty, and what is prefetched for
        it would be out of reach of a recall."""
        link = self._links.find(self.channel_name, self._number, key, self._wire.decode_list)
        if key is None:
            self._link = link
        return link

    def close(self) -> None:
        if not self._closed:
            self._links.close(self._number)
            super().close()

    @staticmethod
    def _dropped(wire: Wire, number: int) -> None:
        ReceiverLinks.of(wire.connection).close(number)
        RemoteEnd._dropped(wire, number)

    def get_nowait(self, *, key: Key | None = None) -> T_co:
        raise self._wire.elsewhere("get_nowait", "await get(), or a task that gets ahead")

    async def get_batch(
        self, *, weight: int, at_least: int | None = None, key: Key | None = None
    ) -> list[T_co]:
        number, items, _ = await self._deliver(weight, at_least, key)
        self._links.taken(number, 0, len(items))
        return items

    async def _deliver(
        self,
        weight: int,
        at_least: int | None,
        key: Key | None,
        *,
        lease: bool = False,
        confirmed: bool = True,
    ) -> tuple[int, list[T_co], list[int]]:
        """Wait for a delivery: its number, its items, and how often each was handed out. It is not
        settled; one with an item that cannot be used is."""
        self.open()
        check_key_and_weight(self.channel_name, key, 1)
        checked_least(self.channel_name, weight, at_least)
        self._links.return_items(self._number, key)
        while True:
            get = protocol.Get(
                self._number, key, weight, at_least, current_party.get(),
                id(getting_task(self.channel_name)), lease,
                taken=self._links.take_unreported(), confirmed=confirmed,
            )  # fmt: skip
            connection = self._wire.connection
            answer = await connection.ask(
                "channel.get", get, reply=DELIVERED, on_channel=True, withdraw=not get.taken
            )
            if connection.closed:  # it has gone back, and others may have it
                raise connection.lost_as(f"connection to {connection.peer!r} was lost")
            delivered, number = answer.meta, answer.number
            if isinstance(delivered, int):
                parts, counts = [answer.body or Encoded(b"")], []
            else:
                parts, counts = split(delivered.sizes, answer.body), delivered.deliveries
                if delivered.payloads and not await self._are_here(
                    number, parts, delivered.payloads
                ):
                    continue
            return number, self._decoded(number, parts), counts

    async def _are_here(
        self, number: int, parts: list[Encoded], left: list[protocol.PayloadRef]
    ) -> bool:
        """Fetch the arrays of a delivery; False if some are lost, and the other items returned."""
        wire, whole = self._wire, (number, 0, len(parts))
        try:
            attach(parts, left)
            lost = await fetch_all(wire.connection, wire.direct, parts)
        except BaseException:
            self._links.settle([whole], Outcome.RETURNED)
            raise
        if not lost:
            return True
        self._links.settle([(number, index, 1) for index in lost], Outcome.LOST)
        self._links.settle([whole], Outcome.RETURNED)
        return False

    def _decoded(self, number: int, parts: list[Encoded]) -> list[Any]:
        """The items of a delivery. One that cannot be read goes to the dead letters, the others
        back.

        Raises:
            MalformedFrame: of that item.
        """
        found: list[Any] = []
        for index, part in enumerate(parts):
            try:
                found.append(self._wire.decode(part))
            except MalformedFrame as error:
                self._links.settle([(number, index, 1)], Outcome.REJECTED, error)
                self._links.settle([(number, 0, len(parts))], Outcome.RETURNED)
                raise self._wire.unreadable(error) from error
        return found

    async def _take(
        self, weight: int, at_least: int | None, key: Key | None, *, confirmed: bool = True
    ) -> tuple[protocol.Range, Lease[T_co]]:
        number, items, counts = await self._deliver(
            weight, at_least, key, lease=True, confirmed=confirmed
        )
        return (number, 0, len(items)), Lease(items, counts, self._wire.encode)

    async def _acknowledge(
        self, delivery: protocol.Range, replacements: Mapping[int, Encoded] = NO_REPLACEMENTS
    ) -> None:
        connection = self._wire.connection
        sizes, body = join(list(replacements.values())) if replacements else ([], None)
        settle = protocol.Settle(
            [delivery], Outcome.TAKEN, replaced=list(replacements), sizes=sizes
        )
        try:
            await connection.request("delivery.settle", settle, body, reply=protocol.Nothing)
        except (asyncio.CancelledError, GeneratorExit):
            if not connection.closed:  # the block has ended: it may have been heard, or not
                connection.notify("delivery.settle", settle, body)
            raise
        except ConnectionLost as error:
            raise LeaseLost(
                f"a lease on channel {self.channel_name!r} was taken back before it was "
                f"acknowledged, or nobody knows: the connection to {connection.peer} was lost"
            ) from error

    def _consume(self, delivery: protocol.Range) -> None:
        self._links.taken(*delivery)

    def _put_back(self, delivery: protocol.Range, error: BaseException) -> None:
        self._links.settle([delivery], Outcome.FAILED, error_text(error))

    def _count_stale(self) -> None:
        if not self._wire.connection.closed:
            self._wire.connection.notify("channel.stale", protocol.End(self._number))
