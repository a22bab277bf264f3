"""A connection between two processes: requests and notices in both directions.

What is kept, on whichever side:

* every request gets one answer, an error, or `ConnectionLost`; none waits for ever: a peer that
  says nothing for the heartbeat's limit is given up;
* a cancelled request reaches its handler before anything that is asked later, and an answer that
  crosses it counts as not taken: the handler's ``undo`` runs;
* an answer that somebody took is confirmed (RECEIPTS), so its handler can forget it;
* what arrives is handled in the order in which it was sent, lane by lane;
* a cut socket is replaced by another, on which both streams go on at the byte where they were cut:
  see `kept` and `reach`. Only when that fails is the connection lost.

::

    open <--cut, found again--> reconnecting
      \\--close(), abort()----------/--patience over, peer gone--> closed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import ConnectionLost, MalformedFrame
from rlinf_async.channels.saying import fit
from rlinf_async.channels.waitfor import WaitFuture
from rlinf_async.channels.wire.answering import Answering
from rlinf_async.channels.wire.asking import Answer, Asking, head_of, reply_decoder
from rlinf_async.channels.wire.failures import UNREADABLE
from rlinf_async.channels.wire.framing import Flag, FrameType, pack_small
from rlinf_async.channels.wire.heartbeat import Heartbeat, Pulse
from rlinf_async.channels.wire.life import is_stopped, peer_pid
from rlinf_async.channels.wire.link import Link
from rlinf_async.channels.wire.outbox import Outbox
from rlinf_async.channels.wire.pool import process_pool
from rlinf_async.channels.wire.reach import Reach
from rlinf_async.channels.wire.router import Router
from rlinf_async.channels.wire.shared_memory import MemoryUse, Sharing
from rlinf_async.channels.wire.transfer import CONTROL, DATA, Message, MessageReader

R = TypeVar("R")
Closed = Callable[["Connection", str], None]
Redial = Callable[["Connection"], Coroutine[Any, Any, None]]
"""Connects again, until it works or the connection is given up."""

log = logging.getLogger(__name__)
MAX_UNSENT_MESSAGES = 65_536
"""A peer that asks but does not read the answers is not read any more from here on."""
SAY_ARRIVED_BYTES = 256 * 1024
"""After so many bytes the peer is told how much arrived."""


class Connection:
    """One side of a connection. Made by `connect` and `serve`.

    Args:
        peer: the name that the other side proved.
        number: of this connection, on both sides.
        patience: seconds for which it is kept when it is cut; 0: a cut ends it.
        redial: connects again; None on the side that waits to be found.
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
        self._loop = asyncio.get_running_loop()
        self.peer = peer
        """the name that the other side proved in the handshake"""
        self.number = number
        self._link: Link | None = None
        self._pid = 0
        self._reader = MessageReader()
        self._outbox = Outbox(self._loop, keep=patience > 0)
        self._sharing = Sharing(self._loop, self._outbox, process_pool())
        self._asking = Asking(self._outbox)
        self._answering = Answering(self, router, self._outbox)
        self._pulse = Pulse(heartbeat, self._beat, self._silent)
        self._patient = redial is not None
        again = None if redial is None else partial(redial, self)
        self.reach = Reach(patience, again, self._lose)
        """what is done about a cut"""
        self._outbox.share = self._sharing.send
        self._on_close: list[Closed] = []
        self._reason = ""
        self._deaf = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.closed = False
        self.linger: Callable[[Callable[[], None]], bool] | None = None
        """whether closing must wait; then what it is given is called as soon as it need not"""
        self.received_bytes = 0
        self._said_arrived = 0
        self.parts: dict[type, Any] = {}
        """what is kept for as long as this connection, by its class"""

    # ---- for the user

    @property
    def reconnecting(self) -> bool:
        """Whether it is cut now: what is asked waits until it goes on, or is lost."""
        return self.reach.cut

    @property
    def sent_bytes(self) -> int:
        return self._outbox.sent_bytes

    @property
    def memory(self) -> MemoryUse:
        """How many messages with large arrays went by shared memory, and how many did not."""
        return self._sharing.use

    @property
    def answers(self) -> Router:
        """What only this connection answers, beside what its router does."""
        return self._answering.own

    @property
    def outbox(self) -> Outbox:
        """Where what is said together is collected."""
        return self._outbox

    @property
    def unsent(self) -> int:
        """Messages that wait because the peer does not read."""
        return self._outbox.waiting

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
    ) -> Answer[R]:
        """As `request`, for an answer that is to be looked at before it counts as taken.

        Whoever gets it calls its ``take`` or ``refuse`` before anything is awaited.
        """
        self._check_open()
        future: asyncio.Future[Message] = (
            WaitFuture(loop=self._loop) if on_channel else self._loop.create_future()
        )
        number = self._asking.ask(future, kind, meta, body, CONTROL if control else DATA)
        try:
            message = await future
        except (asyncio.CancelledError, GeneratorExit):
            if not self.closed:
                self._asking.cancel(number)
            raise
        try:
            found: R = reply_decoder(reply)(message.head)
        except UNREADABLE as error:
            raise self._malformed(f"the answer to {kind!r}: {error}") from error
        return Answer(found, message, self._asking)

    def notify(
        self, kind: str, meta: Any, body: Encoded | None = None, *, control: bool = False
    ) -> None:
        """Tell the peer something that it does not answer.

        Raises:
            ConnectionLost: the connection is closed.
            ItemTooLarge: the message is over a limit.
        """
        self._check_open()
        lane = CONTROL if control else DATA
        self._outbox.send(FrameType.NOTICE, 0, head_of(kind, meta), body, lane, what=kind)

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
        first (`linger`), the peer has so long for that, too.
        """
        if self.closed or (self.linger is not None and self.linger(partial(self.close, reason))):
            return
        self._asking.flush_receipts()
        self._outbox.flush_all()
        self._say_goodbye(reason)

    def abort(self, reason: str) -> None:
        """Give the connection up at once: what waits to be sent is not. The peer is told why."""
        if self.closed:
            if self._link is not None:
                self._link.drop()
            return
        self._outbox.clear()
        self._say_goodbye(reason)

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await asyncio.shield(self._ended)
        if self._link is not None:
            await asyncio.shield(self._link.ended)
        await self.reach.wait_stopped()

    # ---- for `Answering`

    def answered(self) -> None:
        """An answer was queued; a peer that does not take any must stop asking."""
        too_many = self._outbox.waiting > MAX_UNSENT_MESSAGES
        if too_many and not self._deaf and self._transport is not None:
            self._deaf = True
            self._transport.pause_reading()

    # ---- sockets

    def carry(self, link: Link, arrived: int) -> None:
        """Go on over this socket; so many bytes of ours have arrived at the other side."""
        if self.closed or link.transport is None:
            link.hang_up()
            return
        self._link = link
        self._pid = peer_pid(link.transport)
        self._sharing.attach(link.transport)
        self.reach.found()
        self._pulse.start()
        if self._deaf:
            link.transport.pause_reading()
        try:
            self._outbox.attach(link.transport, arrived)
        except MalformedFrame as error:
            self._malformed(str(error))

    def cut(self, link: Link, reason: str) -> None:
        """This socket is gone. Not the one in use: that was known."""
        if link is not self._link or self.closed:
            return
        self._link = None
        self._pulse.stop()
        self._outbox.cut()
        if not self.reach.patience:
            self._lose(reason)
            return
        log.info("the connection to %s was cut (%s): connecting again", self.peer, reason)
        self.reach.was_cut(reason, self._pid)

    def make_way(self) -> None:
        """The peer comes with another socket: the one in use is of no use to it any more."""
        link = self._link
        if link is not None:
            link.drop()
            self.cut(link, "the peer connected again")

    def data_received(self, data: bytes) -> None:
        self._pulse.heard()
        self.received_bytes += len(data)
        if not self.closed:
            self._read(data)
        if not self.closed:
            if self.received_bytes - self._said_arrived >= SAY_ARRIVED_BYTES:
                self._say_arrived()
            self._outbox.flush()

    def pause_writing(self) -> None:
        self._outbox.pause()

    def resume_writing(self) -> None:
        self._outbox.resume()
        few = self._outbox.waiting <= MAX_UNSENT_MESSAGES // 2
        if few and self._deaf and not self.closed:
            self._deaf = False
            if self._transport is not None:
                self._transport.resume_reading()

    @property
    def _transport(self) -> asyncio.Transport | None:
        return None if self._link is None else self._link.transport

    def _say_arrived(self) -> None:
        self._said_arrived = self.received_bytes
        self._outbox.add_control(pack_small(FrameType.PING, self.received_bytes))

    def _beat(self) -> None:
        """Say that this side lives, if it said nothing lately or has something to confirm."""
        quiet = self._loop.time() - self._outbox.last_sent >= self._pulse.interval / 2
        if quiet or self.received_bytes != self._said_arrived:
            self._say_arrived()

    # ---- reading

    def _read(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._receive(message)
                if self.closed:
                    return
        except (MalformedFrame, *UNREADABLE) as error:
            self._malformed(str(error))

    def _malformed(self, what: str) -> MalformedFrame:
        log.error("connection to %s is closed, it sent a malformed frame: %s", self.peer, what)
        self.close(f"a malformed frame: {what}")
        return MalformedFrame(f"{self.peer}: {what}")

    def _receive(self, message: Message) -> None:
        kind = message.type
        if message.flags & Flag.SHARED or (message.body is not None and message.body.buffers):
            message = self._sharing.receive(message)
        if kind in (FrameType.REQUEST, FrameType.NOTICE):
            self._answering.handle(message)
        elif kind in (FrameType.REPLY, FrameType.ERROR):
            self._asking.resolve(message)
        elif kind == FrameType.RECEIPTS:
            self._answering.taken(message)
        elif kind == FrameType.CANCEL:
            self._reader.forget(message.number)
            self._answering.cancelled(message.number, message.head)
        elif kind == FrameType.PING:
            self._outbox.arrived(message.number)
        elif kind == FrameType.MEMORY:
            self._sharing.told(message.head, self.peer)
        elif kind == FrameType.GOODBYE:
            self._leave(message.head.decode(errors="replace"))

    # ---- ending

    def _check_open(self) -> None:
        if self.closed:
            raise self._lost()

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"connection to {self.peer or 'a peer'!r} was lost: {self._reason}")

    def _silent(self, seconds: float) -> bool:
        """Whether to go on waiting. An owner that was stopped is waited for: nobody can take over
        what it has, and the work goes on with it. A stopped worker's items go to others."""
        if self._patient and is_stopped(self._pid):
            return True
        self.abort(f"nothing was heard for {seconds:.1f} s: the process is stopped, or blocked")
        return False

    def _leave(self, reason: str) -> None:
        self._hang_up()
        self._lose(f"{self.peer} closed it: {reason}")

    def _say_goodbye(self, reason: str) -> None:
        said = fit(reason).encode()[:1000]
        self._outbox.add_control(pack_small(FrameType.GOODBYE, 0, said))
        self._outbox.flush_all()
        self._hang_up()
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        """Give up what was under way, once."""
        if self.closed:
            return
        self.closed = True
        self._reason = reason
        self._pulse.stop()
        self.reach.stop()
        self._outbox.detach()
        self._sharing.close()
        self._asking.lose(self._lost)
        self._answering.lose(reason)
        for callback in self._on_close:
            self._tell(callback)
        self._ended.set_result(None)

    def _tell(self, callback: Closed) -> None:
        try:
            callback(self, self._reason)
        except Exception:  # the others must hear of it all the same
            log.exception("a callback for the end of the connection to %s", self.peer)

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.hang_up()
