"""The peer's requests: which handler answers which kind, and each until its answer was taken."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec

from rlinf_async.channels.errors import ChannelError, ItemTooLarge, MalformedFrame, error_text
from rlinf_async.channels.untyped import Encoded
from rlinf_async.channels.wire.frames import Flag, FrameType, Message
from rlinf_async.channels.wire.session.connection import Connection
from rlinf_async.channels.wire.session.requests import UNREADABLE, report
from rlinf_async.channels.wire.slab import is_private

M = TypeVar("M")

Reply = tuple[Any, Encoded | None]
Handler = Callable[[Connection, M, Encoded | None], Coroutine[Any, Any, Reply]]

log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
MAX_HELD_BYTES = 512 * 1024**2
"""Of requests that wait to be answered, such as puts for which there is no room; in this process's
memory, for one peer. The largest of them does not count: an item of any size can be put, and does
not keep smaller ones from being put to other channels."""
_RECEIPT = int(Flag.RECEIPT)  # the enums are slow to ask
_REQUEST, _REPLY, _ERROR = FrameType.REQUEST, FrameType.REPLY, FrameType.ERROR


class Unsettled(Protocol):
    """An answer that was given, and that the asker has not settled yet."""

    def returned(self) -> None:
        """The asker gave its request up before it saw the answer: nothing of it was taken."""

    def losing(self) -> AbstractContextManager[None]:
        """The connection is lost: in this block `lost` follows, of this and of all others."""
        ...

    def lost(self, reason: str) -> None:
        """The connection is lost: whether the asker has taken it is unknown."""


class Request(msgspec.Struct, Generic[M], eq=False):
    """A request of the peer that a handler answers, now or later, once.

    A notice has no reply: replies to it are dropped, and failures are logged.
    """

    connection: Connection
    peer_requests: PeerRequests
    kind: str
    number: int
    lane: int
    body: Encoded | None
    meta: M = cast("Any", None)
    """its arguments"""
    open: bool = True
    """whether an answer is still wanted"""
    abandon: Callable[[], None] | None = None
    """called if the answer is wanted no more before it was given"""
    held: int = 0
    """bytes of its body that count as held here until it is answered"""

    def reply(
        self,
        meta: Any,
        body: Encoded | None = None,
        *,
        unsettled: Unsettled | None = None,
        receipt: bool = False,
    ) -> None:
        """Answer. ``unsettled`` is called if the answer turns out not to have been taken, until it
        is removed from `PeerRequests.unsettled`; with ``receipt`` that is done as soon as the asker
        has the answer.

        Raises:
            ItemTooLarge: the answer is over a limit; the request is still open.
        """
        if self.open:
            self.peer_requests.reply(self, meta, body, unsettled, receipt)

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        if self.open:
            self.peer_requests.fail(self, error)


class Route(NamedTuple):
    """How one kind of request is read and answered."""

    kind: str
    decode: Callable[[bytes], Any]
    answer: Callable[[Request[Any]], None] | None
    handle: Handler[Any] | None


class Router:
    """The kinds of requests that this process answers."""

    def __init__(self) -> None:
        self.routes: dict[bytes, Route] = {}
        """by how a request begins: the length of the kind, and the kind"""

    def add(self, kind: str, meta_type: type[M] | None, handler: Handler[M]) -> None:
        """Answer this kind with a coroutine, which is cancelled when the asker cancels or dies.

        Args:
            kind: what askers call it.
            meta_type: of its arguments, a small msgspec Struct; None if it has none.
        """
        self._add(Route(kind, msgspec.msgpack.Decoder(meta_type).decode, None, handler))

    def add_sync(
        self, kind: str, meta_type: type[M] | None, handler: Callable[[Request[M]], None]
    ) -> None:
        """Answer this kind with a function that calls ``request.reply``, at once or later."""
        self._add(Route(kind, msgspec.msgpack.Decoder(meta_type).decode, handler, None))

    def answering(self, connection: Connection) -> PeerRequests:
        """Answers what the peer of this connection asks."""
        return PeerRequests(connection, self)

    def _add(self, route: Route) -> None:
        name = route.kind.encode()
        if not 1 <= len(name) <= 255:
            raise ValueError(f"the kind of a request has 1 to 255 bytes, {route.kind!r} does not")
        begin = bytes((len(name),)) + name
        if begin in self.routes:
            raise ValueError(f"requests of kind {route.kind!r} have a handler already")
        self.routes[begin] = route


class PeerRequests:
    """The requests of a connection's peer that are not answered, or not settled."""

    def __init__(self, connection: Connection, router: Router) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._routes = router.routes
        self._outbox = connection.outbox
        self._asked: dict[int, Request[Any]] = {}
        self._tasks: dict[asyncio.Task[Reply], Request[Any]] = {}
        self.unsettled: dict[int, Unsettled] = {}
        """answers that were given and are not settled, by the number of the request"""
        self._receipts: set[int] = set()
        """those of them that are settled as soon as the peer has them"""
        self._held = 0
        self._lost: str | None = None
        self.own = Router()
        """what only this connection answers"""
        connection.attach(self)

    @classmethod
    def of(cls, connection: Connection) -> PeerRequests:
        """Those of this connection."""
        found = connection.attached(cls)
        assert found is not None  # every connection has them from its start
        return found

    # ---- what arrives

    def handle(self, message: Message) -> None:
        """Give a request or a notice to its handler; arguments that it cannot read are refused.

        Raises:
            MalformedFrame: its kind cannot be read, or its number is in use.
        """
        head, body = message.head, message.body
        size = head[0] + 1 if head else 0
        number = message.number if message.type == _REQUEST else 0
        begin = head[:size]
        route = self._routes.get(begin) or self.own.routes.get(begin)
        kind = _kind(begin) if route is None else route.kind
        request: Request[Any] = Request(self._connection, self, kind, number, message.lane, body)
        if number:
            if number in self._asked or number in self.unsettled:
                raise MalformedFrame(f"request {number} was made twice")
            self._asked[number] = request
        if route is None:
            request.fail(ChannelError(f"no handler for requests of kind {kind!r} here"))
            return
        try:
            request.meta = route.decode(head[size:])
        except UNREADABLE as error:
            request.fail(MalformedFrame(f"the arguments of {kind!r}: {error}"))
            return
        try:
            if route.answer is not None:
                route.answer(request)
                if not number:  # a notice cannot be given up
                    request.open = False
                    if request.abandon is not None:
                        self._abandon(request)
                elif request.open and request.body is not None:
                    self._hold(request, request.body)
            elif route.handle is not None:
                self._start(request, route.handle(self._connection, request.meta, body))
        except Exception as error:
            self._failed(request, error)

    def cancelled(self, number: int) -> None:
        """The peer gave this request up before it saw the answer."""
        request = self._asked.get(number)
        if request is not None:
            self._abandon(request)
        elif (unsettled := self.unsettled.pop(number, None)) is not None:
            self._receipts.discard(number)
            self._guarded(unsettled.returned)

    def taken(self, message: Message) -> None:
        """The peer has these answers."""
        if len(message.head) % 8:
            raise MalformedFrame(f"receipts of {len(message.head)} bytes")
        for (number,) in struct.iter_unpack("<Q", message.head):
            if number in self._receipts:
                self._receipts.discard(number)
                self.unsettled.pop(number, None)

    def lose(self, reason: str) -> None:
        """The peer takes no answer any more."""
        self._lost = reason
        unsettled = list(self.unsettled.values())
        self.unsettled.clear()
        losing = ExitStack()
        for one in unsettled:
            losing.enter_context(one.losing())
        for request in list(self._asked.values()):  # first, so that nothing is handed to it
            self._abandon(request)
        for task in self._tasks:  # those of notices too
            task.cancel()
        for one in unsettled:
            self._guarded(partial(one.lost, reason))
        self._guarded(losing.close)

    # ---- answers

    def reply(
        self, request: Request[Any], meta: Any, body: Encoded | None,
        unsettled: Unsettled | None, receipt: bool,
    ) -> None:  # fmt: skip
        """Use `Request.reply`."""
        number = request.number
        if number and self._lost is None:
            flags = _RECEIPT if receipt else 0
            outbox, head = self._outbox, _encode(meta)
            outbox.send(_REPLY, number, head, body, request.lane, flags=flags, what=request.kind)
            if outbox.paused:
                self._connection.answered()
            if unsettled is not None:
                self.unsettled[number] = unsettled
                if receipt:
                    self._receipts.add(number)
        elif unsettled is not None:
            unsettled.returned()  # a notice takes no answer, and a lost peer neither
        self._forget(request)

    def fail(self, request: Request[Any], error: BaseException) -> None:
        """Use `Request.fail`."""
        if not request.number:
            log.warning("notice %r of %s failed: %s", request.kind, self._peer, error_text(error))
        elif self._lost is None:
            head = _encode(report(error))
            self._outbox.send(_ERROR, request.number, head, None, request.lane, what=request.kind)
            self._connection.answered()
        self._forget(request)

    # ---- inside

    @property
    def _peer(self) -> str:
        return self._connection.peer

    def _hold(self, request: Request[Any], body: Encoded) -> None:
        """It waits, and its body with it: a peer must not fill this process's memory so."""
        arrays = sum(len(one) for one in body.buffers if not is_private(one))
        size = len(body.data) + arrays
        if self._held + size > MAX_HELD_BYTES and self._beside_the_largest(size) > MAX_HELD_BYTES:
            held, abandon = self._held, request.abandon
            request.fail(
                ItemTooLarge(
                    f"{request.kind!r} of {self._peer} was refused: {held} bytes of its requests "
                    f"wait here already, {MAX_HELD_BYTES} are allowed beside the largest: let "
                    "fewer tasks put at once"
                )
            )
            if abandon is not None:
                self._guarded(abandon)
        else:
            request.held = size
            self._held += size

    def _beside_the_largest(self, size: int) -> int:
        """Bytes that would be held with one more request of this size, without the largest."""
        largest = max((request.held for request in self._asked.values()), default=0)
        return self._held + size - max(largest, size)

    def _start(self, request: Request[Any], running: Coroutine[Any, Any, Reply]) -> None:
        task = self._loop.create_task(running, name=f"{request.kind} for {self._peer}")
        self._tasks[task] = request
        request.abandon = partial(_cancel, task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Reply]) -> None:
        request = self._tasks.pop(task)
        if task.cancelled():
            request.fail(ChannelError(f"the handler of {request.kind!r} was cancelled"))
        elif (error := task.exception()) is not None:
            self._failed(request, error)
        else:
            try:
                request.reply(*task.result())
            except Exception as refused:
                request.fail(refused)

    def _failed(self, request: Request[Any], error: BaseException) -> None:
        # The asker is gone; a channel that ended meanwhile is not worth a line.
        if request.number and not request.open and not isinstance(error, ChannelError):
            log.error("handling %r of %s", request.kind, self._peer, exc_info=error)
        request.fail(error)

    def _abandon(self, request: Request[Any]) -> None:
        abandon = request.abandon
        self._forget(request)
        if abandon is not None:
            self._guarded(abandon)

    def _guarded(self, clean: Callable[[], None]) -> None:
        """An error in cleaning up after one request must not keep the others from it."""
        try:
            clean()
        except Exception:
            log.exception("cleaning up after %s", self._peer)

    def _forget(self, request: Request[Any]) -> None:
        request.open = False
        request.abandon = None
        if request.held:
            self._held -= request.held
            request.held = 0
        if request.number:
            self._asked.pop(request.number, None)


def _cancel(task: asyncio.Task[Reply]) -> None:
    task.cancel()


def _kind(begin: bytes) -> str:
    """The kind of a request without a handler.

    Raises:
        MalformedFrame: it does not say so.
    """
    try:
        return begin[1:].decode()
    except UnicodeDecodeError as error:
        raise MalformedFrame(f"the kind of a request: {error}") from error
