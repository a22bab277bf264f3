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
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from rlinf_async.channels.errors import ConnectionLost, MalformedFrame, fit
from rlinf_async.channels.statistics import WaitFuture
from rlinf_async.channels.untyped import Encoded
from rlinf_async.channels.wire.frames import (
    CONTROL,
    DATA,
    Flag,
    FrameType,
    Message,
    pack_small,
)
from rlinf_async.channels.wire.pool import process_pool
from rlinf_async.channels.wire.session import link as distance
from rlinf_async.channels.wire.session.busy_poll import PROGRESS_BYTES, ProgressTimer
from rlinf_async.channels.wire.session.link import GRACE_SECONDS
from rlinf_async.channels.wire.session.requests import (
    UNREADABLE,
    Answer,
    OwnRequests,
    ReplyTarget,
    head_of,
    reply_decoder,
)
from rlinf_async.channels.wire.session.streams import Heartbeat, Streams
from rlinf_async.channels.wire.sharing import MemoryUse, Sharing


class Linger:
    """Lets closing a connection wait until nothing is open; a peer that makes no progress with it
    for `GRACE_SECONDS` is given up. See `Connection.add_linger`.

    Args:
        open_count: how much is open. Once it is 0, `settled` is to be called.
        begin: called once when closing waits for it.
        lost: what the count is of, and what became of it, for the reason: "items were not taken".
    """

    def __init__(
        self,
        connection: Connection,
        open_count: Callable[[], int],
        begin: Callable[[], object],
        lost: str,
    ) -> None:
        self._connection = connection
        self._open_count = open_count
        self._begin = begin
        self._lost = lost
        self._then: Callable[[], None] | None = None
        self._timer: ProgressTimer | None = None

    def must_wait(self, then: Callable[[], None]) -> bool:
        """Whether closing must wait; if so, ``then`` is called as soon as it need not."""
        if not self._open_count():
            return False
        if self._then is None:
            self._then = then
            self._timer = ProgressTimer(GRACE_SECONDS, self._progress, self._give_up)
            self._begin()
        return True

    def settled(self) -> None:
        """Nothing is open any more."""
        then, self._then = self._then, None
        self.stop()
        if then is not None:
            asyncio.get_running_loop().call_soon(then)

    def stop(self) -> None:
        """The connection is lost."""
        if self._timer is not None:
            self._timer.cancel()

    def _progress(self) -> tuple[int, int]:
        return self._open_count(), self._connection.sent_bytes // PROGRESS_BYTES

    def _give_up(self, progress: tuple[int, int]) -> None:
        self._connection.abort(f"{progress[0]} {self._lost} when it was closed")


A = TypeVar("A")
R = TypeVar("R")
Closed = Callable[["Connection", str], None]
Redial = Callable[["Connection"], Coroutine[Any, Any, None]]
"""Connects again, until it works or the connection is given up."""

log = logging.getLogger(__name__)
_SHARED, _NOTICE = int(Flag.SHARED), FrameType.NOTICE  # the enums are slow to ask


class Answering(Protocol):
    """Answers the requests of a connection's peer."""

    def handle(self, message: Message) -> None:
        """A request or a notice came.

        Raises:
            MalformedFrame: it does not follow the protocol.
        """

    def cancelled(self, number: int) -> None:
        """The peer gave this request up before it saw the answer."""

    def taken(self, message: Message) -> None:
        """The peer has these answers.

        Raises:
            MalformedFrame: it does not follow the protocol.
        """

    def lose(self, reason: str) -> None:
        """The peer takes no answer any more."""


class Connection(Streams):
    """One side of a connection. Made by `connect` and `serve`.

    Args:
        answering: makes what answers the peer's requests; called once.
        peer, patience: as of `Streams`.
        number: of this connection, on both sides.
        redial: connects again; None on the side that waits.
    """

    def __init__(
        self,
        answering: Callable[[Connection], Answering],
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
        self._sharing = Sharing(self._loop, self.outbox, process_pool())
        self.outbox.new_share = self._sharing.new_share
        self._on_close: list[Closed] = []
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._lingers: list[Linger] = []
        self._attached: dict[type, Any] = {}
        self._peer_requests = answering(self)
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
        """As `request`, for an answer that is to be looked at before its ``take`` is called.

        ``withdraw``: whether the request need not reach the peer if this is cancelled before.
        """
        if self.closed:
            raise self._lost()
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

    def post(
        self,
        waiting: ReplyTarget,
        kind: str,
        head: bytes,
        body: Encoded | None = None,
        *,
        control: bool = False,
    ) -> int:
        """As `ask`, for a target that is called when the answer arrives; the request's number.
        ``head``: what `head_of` makes of its kind and its arguments.

        An answer that cannot be decoded is reported to the target, and ends the connection.
        """
        if self.closed:
            raise self._lost()
        return self._own_requests.ask(waiting, kind, head, body, CONTROL if control else DATA)

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

    @property
    def round_trip(self) -> float:
        """Seconds that a message and its answer take on the way, as the system measures it; 0 over
        a Unix socket, while it is cut, and where the system does not say."""
        return distance.round_trip(self.transport)

    @property
    def far(self) -> bool:
        """Whether a round trip takes so long that it is worth larger windows, and copies."""
        return self.round_trip >= distance.FAR_SECONDS

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
        """They go on over this socket."""
        self._sharing.attach(transport)

    def _handle(self, messages: Iterator[Message]) -> None:
        handlers = self._handlers
        try:
            for message in messages:
                body = message.body
                if message.flags & _SHARED or (body is not None and body.buffers):
                    handlers[message.type](self._sharing.receive(message))
                else:
                    handlers[message.type](message)
                if self.closed:
                    return
        except (MalformedFrame, *UNREADABLE) as error:
            self.malformed(str(error))

    def malformed(self, what: str) -> MalformedFrame:
        """The peer does not follow the protocol: close. The error to raise."""
        log.error("connection to %s is closed, it sent a malformed frame: %s", self.peer, what)
        if not self.closed:
            self._close(f"a malformed frame: {what}")  # nothing of what it says is waited for
        return MalformedFrame(f"{self.peer}: {what}")

    def _cancelled(self, message: Message) -> None:
        if message.head:
            raise MalformedFrame("a cancellation has no arguments")
        self._reader.forget(message.number)
        self._peer_requests.cancelled(message.number)

    def _message_handlers(self) -> dict[int, Callable[[Message], None]]:
        """What is done about each type of message; CHUNK is none."""
        peer_requests, asking = self._peer_requests, self._own_requests
        return {
            FrameType.REQUEST: peer_requests.handle,
            FrameType.NOTICE: peer_requests.handle,
            FrameType.REPLY: asking.resolve,
            FrameType.ERROR: asking.resolve,
            FrameType.RECEIPTS: peer_requests.taken,
            FrameType.CANCEL: self._cancelled,
            FrameType.PING: lambda message: self.outbox.arrived(message.number),
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
        self.outbox.add_control(pack_small(FrameType.GOODBYE, 0, said))
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
        self._peer_requests.lose(reason)
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
    """through the socket: what lies in shared memory is not sent"""
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
