"""Large arrays from producer to consumer, past the process that owns their channel.

The producer keeps them and puts the rest of the item; who gets it fetches them. Invariants:

* the producer keeps them until the item is consumed: a lease that fails is delivered again;
* a producer that closes its connection gives what it still has to the owner first. One that dies
  takes it along: those items are counted (``statistics().lost``) and logged, and the get is given
  the next one;
* a consumer that cannot reach the producer gets them through the owner, as ever.

On the producer's host they go by shared memory, else by TCP. Who comes proves the cluster's secret,
as on every connection, and names a token that only the owner and the consumers know.

At the owner such an item is queued with a `RemotePayload` in the place of its arrays. When nothing
refers to that any more, whatever became of the item, its producer is sent a release.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, Self, Unpack
from weakref import WeakSet, WeakValueDictionary

from rlinf_async.channels.encoded import Buffer, Encoded
from rlinf_async.channels.errors import ChannelError, ConnectionLost, MalformedFrame, WireError
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.remote_payload import PayloadLost, RemotePayload, remote_payload_of
from rlinf_async.channels.wire.pool import process_pool
from rlinf_async.channels.wire.protocol import (
    MAX_ARRAYS,
    TOKEN_BYTES,
    Fetch,
    Offer,
    Payload,
    PayloadRef,
    PutAbandoned,
    Release,
    RetainedPayload,
    TakeOver,
    Transfer,
    check_offer,
    check_payload,
    fits,
)
from rlinf_async.channels.wire.session.connection import Connection, Request, Router
from rlinf_async.channels.wire.session.endpoint import Server, TcpAddress, Timeouts, connect, serve
from rlinf_async.channels.wire.session.requests import RemoteError

if TYPE_CHECKING:
    from rlinf_async.channels.wire.session.connection import Reply


LEAST: Final = 1024**2
MOST: Final = 1024**3
OUT_OF_REACH_SECONDS: Final = 300.0
"""seconds for which a process that could not be reached is not tried again"""
REACH_SECONDS: Final = 5.0
"""Time limit of the handshake with another worker."""
WAIT_SECONDS: Final = 2.0
"""seconds for which a get waits for a first connection to a host. From then on payloads of that
host come through the owner, until a connection is made"""
DIRECT_VARIABLE: Final = "RLINF_ASYNC_DIRECT"
Use = Literal["auto", "always", "never"]
"""When a worker retains payloads: if its owner is on another host; always; never."""

log = logging.getLogger(__name__)


class Direct:
    """What one process keeps for others, and how it gets what others keep. See `open`."""

    def __init__(self, secret: bytes, name: str, least: int, most: int, times: Timeouts) -> None:
        self.token = os.urandom(TOKEN_BYTES)
        self.host = host_id()
        self.addresses: list[str] = []
        self._secret = secret
        self._name = name
        self._least = least
        self._most = most
        self._times = times
        self._numbers = count(1)
        self._retained: dict[int, list[Buffer]] = {}
        self._servers: list[Server] = []
        self._links: dict[bytes, asyncio.Task[Connection | None]] = {}
        self._failed: dict[bytes, tuple[float, str]] = {}
        """when and why another process could not be reached, by its token"""
        self._slow: set[str] = set()
        """hosts for whose processes no get waits until they are connected"""
        self._closed = False
        self.for_local_owners = False
        """whether payloads are retained also for owners on this host"""
        self._warned = False
        self.retained_bytes = 0
        """bytes of the payloads that are retained"""
        self.fetched = 0
        """items whose arrays this process got from their producer"""
        self.passed = 0
        """items whose arrays it got through the owner of their channel"""

    @classmethod
    async def open(
        cls,
        secret: bytes,
        *,
        name: str,
        listen: Sequence[str | os.PathLike[str]] = (),
        least: int = LEAST,
        most: int = MOST,
        **times: Unpack[Timeouts],
    ) -> Self:
        """Fetch payloads from others, and where it listens let others fetch from this process.

        Args:
            listen: addresses, as of `serve`: a TCP address that the consumers' hosts reach, and for
                those of this host a Unix socket. Without any, this process's own items go through
                the owner.
            least: bytes of the large arrays of an item, from which on they stay here.
            most: bytes retained here at a time; beyond it items go through the owner.
            times: as of `serve` and `connect`.

        Raises:
            ValueError, WireError: as `serve`.
        """
        made = cls(secret, name, least, most, times)
        try:
            for address in listen:
                await made._listen(address)
        except BaseException:
            await made.close()
            raise
        return made

    @classmethod
    async def of_worker(
        cls,
        connection: Connection,
        secret: bytes,
        *,
        name: str,
        use: Use | None = None,
        retain: bool = True,
        least: int = LEAST,
        **times: Unpack[Timeouts],
    ) -> Self | None:
        """The `Direct` of a process with this connection to the owner of its channels.

        Where the owner is on another host, it listens at the interface that leads there, and, for
        the other workers of this host, at a Unix socket, through which payloads go by shared
        memory. Where the owner is on this host, it only fetches what others retain: an item of this
        process goes to the owner by shared memory. An address where it cannot listen is logged, and
        left out.

        Args:
            use: None: as the environment variable ``RLINF_ASYNC_DIRECT`` says; ``auto`` by default.
            retain: whether ``auto`` retains payloads of this process. Not where the work goes on
                after its death: they would be lost.
            least, times: as of `open`.

        Raises:
            ValueError: ``use`` is none of `Use`.
        """
        wanted = use or os.environ.get(DIRECT_VARIABLE) or "auto"
        if wanted not in ("auto", "always", "never"):
            raise ValueError(f"{DIRECT_VARIABLE} is {wanted!r}: write auto, always or never")
        if wanted == "never":
            return None
        listen: list[str] = []
        if wanted == "always" or (retain and not connection.local):
            host = connection.local_host or "127.0.0.1"
            listen = [
                f"@rlinf-{secrets.token_hex(16)}",
                str(TcpAddress(host, 0, connection.encrypted)),
            ]
        times.setdefault("handshake_timeout", REACH_SECONDS)
        made = await cls.open(secret, name=name, least=least, **times)
        made.for_local_owners = wanted == "always"
        for address in listen:
            try:
                await made._listen(address)
            except WireError as error:
                log.warning("%s: no worker will fetch large arrays at %s: %s", name, address, error)
        return made

    async def _listen(self, address: str | os.PathLike[str]) -> None:
        router = Router()
        router.add_sync("payload.fetch", Fetch, self.answer)
        server = await serve(address, self._secret, router=router, name=self._name, **self._times)
        self._servers.append(server)
        self.addresses.append(server.address)

    async def close(self) -> None:
        """Stop listening. Close the connections to the owners first: they take over what is
        retained."""
        self._closed = True
        links, self._links = self._links, {}
        for task in links.values():
            task.cancel()
        for found in await asyncio.gather(*links.values(), return_exceptions=True):
            if isinstance(found, Connection):
                found.close()
                await found.wait_closed()
        for server in self._servers:
            await server.close()

    # ---- as a producer

    def may_retain(self, buffers: Sequence[Buffer]) -> bool:
        """Whether these are large enough to stay here, and not too much."""
        size = sum(map(len, buffers))
        return (
            len(buffers) <= MAX_ARRAYS
            and self._least <= size
            and self.retained_bytes + size <= self._most
        )

    def retain(self, buffers: Sequence[Buffer], *, copied: bool = False) -> int | None:
        """Keep a copy of these; its number, or None if they may not stay here.

        Args:
            copied: whether they are a copy already.
        """
        if not self.may_retain(buffers):
            return None
        self._retained[number := next(self._numbers)] = [
            *(buffers if copied else process_pool().lend(buffers) or map(bytearray, buffers))
        ]
        self.retained_bytes += sum(map(len, buffers))
        return number

    def release(self, number: int) -> None:
        """Forget a payload that will not be fetched."""
        self.retained_bytes -= sum(map(len, self._retained.pop(number)))

    def answer(self, request: Request[Fetch]) -> None:
        """Reply with the requested arrays."""
        found = self._find(request.meta.token, request.meta.number)
        if found is None:
            request.reply(Payload(False))
        else:
            request.reply(Payload(True), Encoded(b"", found))

    def _find(self, token: bytes, number: int) -> list[Buffer] | None:
        return self._retained.get(number) if token == self.token else None

    # ---- as a consumer

    async def fetch(self, left: PayloadRef) -> Sequence[Buffer] | None:
        """What another process keeps, from itself; None if that does not work."""
        if left.token == self.token:
            own = self._find(left.token, left.number)
            return None if own is None else [bytearray(buffer) for buffer in own]
        connection = await self._reach(left)
        if connection is None:
            return None
        try:
            reply, body = await connection.request(
                "payload.fetch", Fetch(left.token, left.number), reply=Payload
            )
        except (ChannelError, RemoteError) as error:
            log.info("arrays could not be fetched from %s: %s", connection.peer, error)
            if connection.closed:  # a network that passes small messages only, or it has died
                self._failed[left.token] = asyncio.get_running_loop().time(), str(error)
            return None
        if body is None or not reply.here or not fits(body, left.sizes):
            return None
        self.fetched += 1
        return body.buffers

    def passed_by_owner(self, left: PayloadRef) -> None:
        """Note that a payload came through the owner; warn once, if its producer is out of
        reach."""
        self.passed += 1
        _, why = self._failed.get(left.token, (0.0, ""))
        if why:
            log.log(
                logging.INFO if self._warned else logging.WARNING,
                "large arrays come through the owner of their channel, because there is no way to "
                "who put them (a firewall between the hosts?): %s", why,
            )  # fmt: skip
            self._warned = True

    async def _reach(self, left: PayloadRef) -> Connection | None:
        """Return the one connection to a producer; None while there is none."""
        if self._closed:
            return None
        loop = asyncio.get_running_loop()
        failed, _ = self._failed.get(left.token, (float("-inf"), ""))
        task = self._links.get(left.token)
        if task is None or _is_gone(task):
            if loop.time() - failed < OUT_OF_REACH_SECONDS:
                return None
            self._links = {of: link for of, link in self._links.items() if not _is_gone(link)}
            task = loop.create_task(self._connect(left))
            self._links[left.token] = task
        if not task.done() and _hosts(left) not in self._slow:
            await asyncio.wait([task], timeout=WAIT_SECONDS)
        if not task.done():
            self._slow.add(_hosts(left))
            return None
        return None if task.cancelled() else task.result()

    async def _connect(self, left: PayloadRef) -> Connection | None:
        why = "it has no address"
        for address in left.addresses:
            if "://" in address or left.host == self.host:
                try:
                    made = await connect(
                        address, self._secret, name=self._name, router=Router(), **self._times
                    )
                except WireError as error:
                    why = str(error)
                else:
                    self._slow.discard(_hosts(left))
                    return made
        self._failed[left.token] = asyncio.get_running_loop().time(), why
        self._slow.add(_hosts(left))
        return None


def _hosts(left: PayloadRef) -> str:
    """What the processes of the same host have in common."""
    return " ".join([left.host, *(address.rpartition(":")[0] for address in left.addresses)])


def _is_gone(task: asyncio.Task[Connection | None]) -> bool:
    if not task.done():
        return False
    found = None if task.cancelled() else task.result()
    return found is None or found.closed


def host_id() -> str:
    """Names this host until it is started again; empty where that cannot be known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


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


AT_ONCE: Final = 4
"""Items of a batch that are fetched at a time."""


def attach(parts: Sequence[Encoded], left: Sequence[PayloadRef]) -> None:
    """Mark the items whose payload is elsewhere.

    Raises:
        MalformedFrame: there is no such item, or it has arrays already.
    """
    for one in left:
        check_payload(one.sizes)
        if not 0 <= one.item < len(parts) or parts[one.item].buffers:
            raise MalformedFrame(f"arrays are to be fetched for item {one.item}, which is none")
        parts[one.item].buffers = RemotePayload(one.sizes, one)


def fetch_ahead(connection: Connection, part: Encoded) -> None:
    """Start to fetch the payload of an item that no caller has asked for yet."""
    payload = remote_payload_of(part)
    if payload is not None and not payload.lost:
        payload.start_loading(partial(_fetch_quietly, connection, payload.where))


async def _fetch_quietly(connection: Connection, left: PayloadRef) -> Sequence[Buffer]:
    try:
        return await _fetch(connection, connection.attached(Direct), left)
    except ConnectionLost as error:  # the item goes to others, with its payload
        raise PayloadLost(str(error)) from error


async def fetch_all(
    connection: Connection, direct: Direct | None, parts: Sequence[Encoded]
) -> list[int]:
    """Fetch the payloads of these items, from their producers or through the owner at the other
    side of the connection. The indices of the items whose payload is lost.

    Raises:
        ConnectionLost: to the owner; the items go to others.
    """
    slots = asyncio.Semaphore(AT_ONCE)

    async def bring(index: int, part: Encoded, payload: RemotePayload) -> None:
        async with slots:
            try:
                part.buffers = (
                    await payload.wait_loaded()
                    if payload.loading or payload.lost
                    else await _fetch(connection, direct, payload.where)
                )
            except PayloadLost:
                lost.append(index)

    lost: list[int] = []
    for part in parts:
        if isinstance(part.buffers, RemotePayload) and part.buffers.loaded is not None:
            part.buffers = part.buffers.loaded
    wanted = [
        (index, part, payload)
        for index, part in enumerate(parts)
        if (payload := remote_payload_of(part)) is not None
    ]
    if len(wanted) == 1:
        await bring(*wanted[0])
    else:
        bringing = [asyncio.ensure_future(bring(*one)) for one in wanted]
        try:
            await asyncio.gather(*bringing)
        finally:
            for task in bringing:
                task.cancel()
    if connection.closed:  # they have gone back, and others may have them
        raise connection.lost_as(f"connection to {connection.peer!r} was lost")
    return lost


async def _fetch(
    connection: Connection, direct: Direct | None, left: PayloadRef
) -> Sequence[Buffer]:
    if direct is not None:
        found = await direct.fetch(left)
        if found is not None:
            return found
    reply, body = await connection.request(
        "payload.pass", Fetch(left.token, left.number), reply=Payload
    )
    if body is None or not reply.here or not fits(body, left.sizes):
        raise PayloadLost("the payload of this item is gone with its producer")
    if direct is not None:
        direct.passed_by_owner(left)
    return body.buffers
