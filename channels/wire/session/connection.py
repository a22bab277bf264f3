"""A connection between two processes: requests and notices in both directions.

Invariants, on both sides:

* every request gets one answer, an error, or `ConnectionLost`; none waits for ever: a peer that
  says nothing for the heartbeat's limit is given up;
* a cancelled request reaches its handler before anything that is asked later, and an answer that
  crosses it counts as not taken: see `PeerRequests.unsettled`;
* an answer that must be known to have been taken is confirmed (RECEIPTS), or settled by whoever
  knows more of it;
* what arrives is handled in the order in which it was sent, lane by lane;
* a cut socket is replaced by another, on which both streams go on at the byte where they were cut:
  see `streams`. Only when that fails is the connection lost.

::

    open <--cut, resumed--> reconnecting
      \\--close(), abort()----------/--patience over, peer gone--> closed
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import (
    ChannelError,
    ConnectionLost,
    ItemTooLarge,
    MalformedFrame,
    error_text,
    fit,
)
from rlinf_async.channels.statistics import WaitFuture
from rlinf_async.channels.wire.frames import (
    CONTROL,
    DATA,
    Flag,
    FrameType,
    Message,
    pack_small,
)
from rlinf_async.channels.wire.pool import process_pool
from rlinf_async.channels.wire.session.requests import (
    UNREADABLE,
    Answer,
    OwnRequests,
    head_of,
    reply_decoder,
    report,
)
from rlinf_async.channels.wire.session.streams import (
    SAY_ARRIVED_BYTES,
    Heartbeat,
    Linger,
    Streams,
)
from rlinf_async.channels.wire.sharing import MemoryUse, Sharing
from rlinf_async.channels.wire.slab import is_private

A = TypeVar("A")
M = TypeVar("M")
R = TypeVar("R")
Closed = Callable[["Connection", str], None]
Redial = Callable[["Connection"], Coroutine[Any, Any, None]]
"""Connects again, until it works or the connection is given up."""

Reply = tuple[Any, Encoded | None]
Handler = Callable[["Connection", M, Encoded | None], Coroutine[Any, Any, Reply]]

log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_SHARED, _RECEIPT = int(Flag.SHARED), int(Flag.RECEIPT)  # the enums are slow to ask
_REQUEST, _REPLY, _ERROR = FrameType.REQUEST, FrameType.REPLY, FrameType.ERROR
_NOTICE = FrameType.NOTICE


class Connection(Streams):
    """One side of a connection. Made by `connect` and `serve`.

    Args:
        router: answers the peer's requests.
        peer, patience: as of `Streams`.
        number: of this connection, on both sides.
        redial: connects again; None on the side that waits.
    """

    def __init__(
        self,
        router: Router,
        heartbeat: Heartbeat,
        *,
        peer: str,
        number: bytes,
        patience: float,
        redial: Redial | None = None,
    ) -> None:
        again = None if redial is None else partial(redial, self)
        super().__init__(heartbeat, peer=peer, patience=patience, redial=again)
        self.number = number
        self.lost_as: Callable[[str], ConnectionLost] = ConnectionLost
        """makes the errors of what is lost with it"""
        self._reason = ""
        self._own_requests = OwnRequests(self.outbox)
        self.post = self._own_requests.ask
        """sends a request whose answer goes to a target when it arrives: see `OwnRequests.ask`"""
        self._sharing = Sharing(self._loop, self.outbox, process_pool())
        self.outbox.new_share = self._sharing.new_share
        self._on_close: list[Closed] = []
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._lingers: list[Linger] = []
        self._attached: dict[type, Any] = {}
        self.peer_requests = PeerRequests(self, router)
        """what the peer has asked"""
        self._handlers = self._message_handlers()

    # ---- requests and notices

    async def request(
        self,
        kind: str,
        meta: Any,
        body: Encoded | None = None,
        *,
        reply: type[R],
        control: bool = False,
        on_channel: bool = False,
    ) -> tuple[R, Encoded | None]:
        """Ask the peer; what it answers. Cancelling this cancels the peer's handler.

        Args:
            kind: which of the peer's handlers.
            meta: its arguments, a small msgspec Struct.
            body: more arguments, of any size.
            reply: the Struct that the peer answers with.
            control: go ahead of all data (a body over 256 KiB goes with the data all the same).
            on_channel: this is a wait on a channel, in the sense of `WaitFuture`.

        Raises:
            ChannelError: as the handler raised it.
            RemoteError: the handler raised something else.
            ConnectionLost: the connection was lost before the answer came.
            ItemTooLarge: the message is over a limit; nothing was sent.
        """
        answer = await self.ask(
            kind, meta, body, reply=reply, control=control, on_channel=on_channel
        )
        answer.take()
        return answer.meta, answer.body

    async def ask(
        self,
        kind: str,
        meta: Any,
        body: Encoded | None = None,
        *,
        reply: type[R],
        control: bool = False,
        on_channel: bool = False,
        withdraw: bool = True,
    ) -> Answer[R]:
        """Send a request, and return an answer that is to be looked at before its ``take`` is
        called.

        ``withdraw``: whether the request need not reach the peer if this is cancelled before.
        """
        future: asyncio.Future[Message] = (
            WaitFuture(loop=self._loop) if on_channel else self._loop.create_future()
        )
        head = head_of(kind, meta)
        number = self._own_requests.ask(future, kind, head, body, CONTROL if control else DATA)
        try:
            message = await future
        except (asyncio.CancelledError, GeneratorExit):
            if not self.closed:
                self._own_requests.cancel(number, withdraw=withdraw)
            raise
        try:
            found: R = reply_decoder(reply)(message.head)
        except UNREADABLE as error:
            raise self.malformed(f"the answer to {kind!r}: {error}") from error
        return Answer(found, message, self._own_requests)

    def give_up(self, number: int, *, withdraw: bool = True) -> bool:
        """The answer to this `post` is wanted no more; the peer's handler is cancelled. Whether the
        peer never heard of it. ``withdraw``: as of `ask`."""
        return not self.closed and self._own_requests.cancel(number, withdraw=withdraw)

    def notify(
        self,
        kind: str,
        meta: Any,
        body: Encoded | None = None,
        *,
        control: bool = False,
        flags: int = 0,
    ) -> None:
        """Tell the peer something that it does not answer. ``flags`` say what is special about it.

        Raises:
            ConnectionLost: the connection is closed.
            ItemTooLarge: the message is over a limit.
        """
        if self.closed:
            raise self._lost()
        lane = CONTROL if control else DATA
        self.outbox.send(_NOTICE, 0, head_of(kind, meta), body, lane, flags=flags, what=kind)

    # ---- for the user

    def attached(self, kind: type[A]) -> A | None:
        """What `attach` was given of this class."""
        return self._attached.get(kind)

    def attach(self, one: A) -> A:
        """Keep this for as long as the connection, to be found again by its class."""
        self._attached[type(one)] = one
        return one

    @property
    def sent_bytes(self) -> int:
        return self.outbox.sent_bytes

    @property
    def memory(self) -> MemoryUse:
        """How many messages with large arrays went by shared memory, and how many did not."""
        return self._sharing.use

    @property
    def unsent(self) -> int:
        """Messages that wait because the peer does not read."""
        return self.outbox.waiting

    def share(self, body: Encoded) -> Encoded | None:
        """The body as it travels with `Flag.SHARED`: its large arrays are copied and lent now. None
        where the peer cannot look at them at once. Whoever gets it sends it."""
        return self._sharing.send_now(body)

    def prepare(self, body: Encoded) -> bool:
        """Copy its large arrays to shared memory, so that sending it later takes no time. Whether
        they will travel by it."""
        return self._sharing.prepare(body)

    def add_linger(self, linger: Linger) -> None:
        """Let `close` wait for this, after those that were added before."""
        self._lingers.append(linger)

    def on_close(self, callback: Closed, *, first: bool = False) -> None:
        """Call this once, with the reason, when the connection is closed or lost.

        ``first`` puts it before those that are there. What a callback raises is logged.
        """
        if self.closed:
            self._loop.call_soon(self._tell, callback)
        else:
            self._on_close.insert(0 if first else len(self._on_close), callback)

    def close(self, reason: str = "it was closed") -> None:
        """Send what waits to be sent, tell the peer, and close.

        A peer that takes nothing for `GRACE_SECONDS` is cut off. Where something must be confirmed
        first (`add_linger`), the peer has so long for that, too; and so long to come back where the
        connection is cut just now.
        """
        again = partial(self.close, reason)
        if self.closed or any(linger.must_wait(again) for linger in self._lingers):
            return
        if self.when_resumed(again):
            return
        self._close(reason)

    def abort(self, reason: str) -> None:
        """Give the connection up at once: what waits to be sent is not. The peer is told why."""
        if self.closed:
            if self.link is not None:
                self.link.drop()
            return
        self.outbox.drop()
        self._say_goodbye(reason)

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await asyncio.shield(self._ended)
        if self.link is not None:
            await asyncio.shield(self.link.ended)
        await self.reconnection.wait_stopped()

    # ---- for its streams

    def _carried(self, transport: asyncio.Transport) -> None:
        """Go on over this socket."""
        self._sharing.attach(transport)

    def received(self, count: int, messages: Iterator[Message]) -> None:
        """Count bytes that came; the messages that they complete are read while they are
        handled."""
        self.monitor.heard = True
        self.received_bytes += count
        if self.closed:
            return
        handlers, outbox = self._handlers, self.outbox
        outbox.held = True
        try:
            for message in messages:
                body = message.body
                if message.flags & _SHARED or (body is not None and body.buffers):
                    message = self._sharing.receive(message)
                handlers[message.type](message)
                if self.closed:
                    return
            if self.received_bytes - self.said_arrived >= SAY_ARRIVED_BYTES:
                self.say_arrived()
        except (MalformedFrame, *UNREADABLE) as error:
            self.malformed(str(error))
        finally:
            outbox.release()

    def malformed(self, what: str) -> MalformedFrame:
        """The peer does not follow the protocol: close. The error to raise."""
        log.error("connection to %s is closed, it sent a malformed frame: %s", self.peer, what)
        if not self.closed:
            self._close(f"a malformed frame: {what}")  # nothing of what it says is waited for
        return MalformedFrame(f"{self.peer}: {what}")

    def _cancelled(self, message: Message) -> None:
        if message.head:
            raise MalformedFrame("a cancellation has no arguments")
        self.reader.forget(message.number)
        self.peer_requests.cancelled(message.number)

    def _acknowledged(self, message: Message) -> None:
        unacknowledged = self.outbox.unacknowledged
        if unacknowledged is not None:
            unacknowledged.forget(message.number)

    def _message_handlers(self) -> dict[int, Callable[[Message], None]]:
        """What is done about each type of message; CHUNK is none."""
        peer_requests, asking = self.peer_requests, self._own_requests
        return {
            FrameType.REQUEST: peer_requests.handle,
            FrameType.NOTICE: peer_requests.handle,
            FrameType.REPLY: asking.resolve,
            FrameType.ERROR: asking.resolve,
            FrameType.RECEIPTS: peer_requests.taken,
            FrameType.CANCEL: self._cancelled,
            FrameType.PING: self._acknowledged,
            FrameType.MEMORY: lambda message: self._sharing.handle(message.head, self.peer),
            FrameType.GOODBYE: lambda message: self._leave(message.head.decode(errors="replace")),
        }

    # ---- ending

    def _leave(self, reason: str) -> None:
        self.hang_up()
        self.lose(f"{self.peer} closed it: {reason}")

    def _close(self, reason: str) -> None:
        self._own_requests.flush_receipts()
        self._sharing.hurry()
        self.outbox.flush_all()
        self._say_goodbye(reason)

    def _say_goodbye(self, reason: str) -> None:
        said = fit(reason).encode()[:1000]
        self.outbox.add(pack_small(FrameType.GOODBYE, 0, said))
        self.outbox.flush_all()
        self.hang_up(first=True)
        self.lose(reason)

    def lose(self, reason: str) -> None:
        """Give up what was under way, once."""
        if self.closed:
            return
        self.closed = True
        self._reason = reason
        self._stop()
        self._sharing.close()
        self._own_requests.lose(self._lost)
        self.peer_requests.lose(reason)
        for callback in self._on_close:
            self._tell(callback)
        self._ended.set_result(None)

    def _lost(self) -> ConnectionLost:
        return self.lost_as(f"connection to {self.peer or 'a peer'!r} was lost: {self._reason}")

    def _tell(self, callback: Closed) -> None:
        try:
            callback(self, self._reason)
        except Exception:  # the others must hear of it all the same
            log.exception("a callback for the end of the connection to %s", self.peer)


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """One connection's counts since it was made. Large arrays are counted in messages."""

    peer: str
    sent_bytes: int
    """bytes through the socket: what lies in shared memory is not sent"""
    received_bytes: int
    sent_shared: int
    """messages whose large arrays went by shared memory, without a copy in the socket"""
    sent_copied: int
    """messages whose large arrays went through the socket"""
    received_shared: int
    received_copied: int
    unsent: int
    """messages that wait because the peer does not read"""
    cuts: int
    """how often its socket was lost and replaced"""
    reconnecting: bool


def traffic_of(connection: Connection) -> Traffic:
    """The counts up to now."""
    memory = connection.memory
    return Traffic(
        peer=connection.peer,
        sent_bytes=connection.sent_bytes,
        received_bytes=connection.received_bytes,
        sent_shared=memory.sent_shared,
        sent_copied=memory.sent_copied,
        received_shared=memory.received_shared,
        received_copied=memory.received_copied,
        unsent=connection.unsent,
        cuts=connection.reconnection.cuts,
        reconnecting=connection.reconnecting,
    )


# ---- what the peer asks

MAX_HELD_BYTES = 512 * 1024**2
"""most bytes, in this process's memory, of one peer's requests that wait to be answered, such as
puts for which there is no room. The largest request does not count: an item of any size can be put,
and does not keep smaller ones from being put to other channels."""


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
    kind: str
    number: int
    lane: int
    body: Encoded | None
    meta: M = cast("Any", None)
    """arguments of the request"""
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
        if not self.open:
            return
        number, asked = self.number, self.connection.peer_requests
        if number and not asked.lost:
            flags = _RECEIPT if receipt else 0
            outbox, head = self.connection.outbox, _encode(meta)
            outbox.send(_REPLY, number, head, body, self.lane, flags=flags, what=self.kind)
            if outbox.paused:
                self.connection.answered()
            if unsettled is not None:
                asked.unsettled[number] = unsettled
                if receipt:
                    asked.receipts.add(number)
        elif unsettled is not None:
            unsettled.returned()  # a notice takes no answer, and a lost peer neither
        asked.forget(self)

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        if not self.open:
            return
        connection = self.connection
        if not self.number:
            log.warning("notice %r of %s failed: %s", self.kind, connection.peer, error_text(error))
        elif not connection.peer_requests.lost:
            head = _encode(report(error))
            connection.outbox.send(_ERROR, self.number, head, None, self.lane, what=self.kind)
            connection.answered()
        connection.peer_requests.forget(self)


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
        """routes by how a request begins: the length of the kind, and the kind"""

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
        self._asked: dict[int, Request[Any]] = {}
        self._tasks: dict[asyncio.Task[Reply], Request[Any]] = {}
        self.unsettled: dict[int, Unsettled] = {}
        """answers that were given and are not settled, by the number of the request"""
        self.receipts: set[int] = set()
        """requests that are settled as soon as the peer has their replies"""
        self._held = 0
        self.lost = False
        """whether the peer takes no answer any more"""
        self.own = Router()
        """what only this connection answers"""

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
        request: Request[Any] = Request(self._connection, kind, number, message.lane, body)
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
            self.receipts.discard(number)
            self._guarded(unsettled.returned)

    def taken(self, message: Message) -> None:
        """The peer has these answers."""
        if len(message.head) % 8:
            raise MalformedFrame(f"receipts of {len(message.head)} bytes")
        for (number,) in struct.iter_unpack("<Q", message.head):
            if number in self.receipts:
                self.receipts.discard(number)
                self.unsettled.pop(number, None)

    def lose(self, reason: str) -> None:
        """The peer takes no answer any more."""
        self.lost = True
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

    # ---- inside

    def _hold(self, request: Request[Any], body: Encoded) -> None:
        """Hold a request that waits, with its body; refuse it where a peer would fill this
        process's memory so."""
        arrays = sum(len(one) for one in body.buffers if not is_private(one))
        size = len(body.data) + arrays
        if self._held + size > MAX_HELD_BYTES and self._beside_the_largest(size) > MAX_HELD_BYTES:
            held, abandon = self._held, request.abandon
            request.fail(
                ItemTooLarge(
                    f"{request.kind!r} of {self._connection.peer} was refused: {held} bytes of its "
                    f"requests wait here already, {MAX_HELD_BYTES} are allowed beside the largest: "
                    "let fewer tasks put at once"
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
        task = self._loop.create_task(running, name=f"{request.kind} for {self._connection.peer}")
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
            log.error("handling %r of %s", request.kind, self._connection.peer, exc_info=error)
        request.fail(error)

    def _abandon(self, request: Request[Any]) -> None:
        abandon = request.abandon
        self.forget(request)
        if abandon is not None:
            self._guarded(abandon)

    def _guarded(self, clean: Callable[[], None]) -> None:
        """An error in cleaning up after one request must not keep the others from it."""
        try:
            clean()
        except Exception:
            log.exception("cleaning up after %s", self._connection.peer)

    def forget(self, request: Request[Any]) -> None:
        """Forget a request that is answered, or whose answer nobody wants any more."""
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
