"""A connection between two processes: requests and notices in both directions.

What is kept, on whichever side:

* every request gets one answer, an error, or `ConnectionLost`; none waits for ever: a peer that
  says nothing for the heartbeat's limit is given up;
* a cancelled request reaches its handler before anything that is asked later, and an answer that
  crosses it counts as not taken: see `Answering.unsettled`;
* an answer that must be known to have been taken is confirmed (RECEIPTS), or settled by whoever
  knows more of it;
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
from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.saying import fit
from rlinf_async.channels.wire.frames.framing import Flag, FrameType, pack_small
from rlinf_async.channels.wire.frames.messages import Message
from rlinf_async.channels.wire.frames.reader import MessageReader
from rlinf_async.channels.wire.memory.pool import process_pool
from rlinf_async.channels.wire.memory.shared_memory import MemoryUse, Sharing
from rlinf_async.channels.wire.session.answers import Answering
from rlinf_async.channels.wire.session.failures import UNREADABLE
from rlinf_async.channels.wire.session.heartbeat import Heartbeat
from rlinf_async.channels.wire.session.outbox import Outbox
from rlinf_async.channels.wire.session.router import Router
from rlinf_async.channels.wire.session.talking import Talking

R = TypeVar("R")
Closed = Callable[["Connection", str], None]
Redial = Callable[["Connection"], Coroutine[Any, Any, None]]
"""Connects again, until it works or the connection is given up."""

log = logging.getLogger(__name__)
_SHARED = int(Flag.SHARED)  # the enums are slow to ask


class Connection(Talking):
    """One side of a connection. Made by `connect` and `serve`.

    Args:
        peer, patience: as of `Streams`.
        number: of this connection, on both sides.
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
        again = None if redial is None else partial(redial, self)
        super().__init__(heartbeat, peer=peer, patience=patience, redial=again)
        self.number = number
        self._reader = MessageReader()
        self._sharing = Sharing(self._loop, self._outbox, process_pool())
        self._answering = Answering(self, router, self._outbox)
        self._outbox.new_share = self._sharing.new_share
        self._hear = self._hearing()
        self._on_close: list[Closed] = []
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.linger: Callable[[Callable[[], None]], bool] | None = None
        """whether closing must wait; then what it is given is called as soon as it need not"""
        self.parts: dict[type, Any] = {}
        """what is kept for as long as this connection, by its class"""

    # ---- for the user

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

    def share(self, body: Encoded) -> Encoded | None:
        """The body as it travels with `Flag.SHARED`: its large arrays are copied and lent now. None
        where the peer cannot look at them at once. Whoever gets it sends it."""
        return self._sharing.send_now(body)

    def prepare(self, body: Encoded) -> bool:
        """Copy its large arrays to shared memory, so that sending it later takes no time. Whether
        they will travel by it."""
        return self._sharing.prepare(body)

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
        first (`linger`), the peer has so long for that, too; and so long to come back where the
        connection is cut just now.
        """
        again = partial(self.close, reason)
        if self.closed or (self.linger is not None and self.linger(again)):
            return
        if self.once_found(again):
            return
        self._close(reason)

    def abort(self, reason: str) -> None:
        """Give the connection up at once: what waits to be sent is not. The peer is told why."""
        if self.closed:
            if self._link is not None:
                self._link.drop()
            return
        self._outbox.drop()
        self._say_goodbye(reason)

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await asyncio.shield(self._ended)
        if self._link is not None:
            await asyncio.shield(self._link.ended)
        await self.reach.wait_stopped()

    # ---- reading

    def _carried(self, transport: asyncio.Transport) -> None:
        self._sharing.attach(transport)

    def _read(self, data: bytes) -> None:
        hear = self._hear
        try:
            for message in self._reader.feed(data):
                body = message.body
                if message.flags & _SHARED or (body is not None and body.buffers):
                    hear[message.type](self._sharing.receive(message))
                else:
                    hear[message.type](message)
                if self.closed:
                    return
        except (MalformedFrame, *UNREADABLE) as error:
            self._malformed(str(error))

    def _malformed(self, what: str) -> MalformedFrame:
        log.error("connection to %s is closed, it sent a malformed frame: %s", self.peer, what)
        if not self.closed:
            self._close(f"a malformed frame: {what}")  # nothing of what it says is waited for
        return MalformedFrame(f"{self.peer}: {what}")

    def _cancelled(self, message: Message) -> None:
        if message.head:
            raise MalformedFrame("a cancellation has no arguments")
        self._reader.forget(message.number)
        self._answering.cancelled(message.number)

    def _hearing(self) -> dict[int, Callable[[Message], None]]:
        """What is done about each type of message; CHUNK is none."""
        answering, asking = self._answering, self._asking
        return {
            FrameType.REQUEST: answering.handle,
            FrameType.NOTICE: answering.handle,
            FrameType.REPLY: asking.resolve,
            FrameType.ERROR: asking.resolve,
            FrameType.RECEIPTS: answering.taken,
            FrameType.CANCEL: self._cancelled,
            FrameType.PING: lambda message: self._outbox.arrived(message.number),
            FrameType.MEMORY: lambda message: self._sharing.told(message.head, self.peer),
            FrameType.GOODBYE: lambda message: self._leave(message.head.decode(errors="replace")),
        }

    # ---- ending

    def _leave(self, reason: str) -> None:
        self._hang_up()
        self._lose(f"{self.peer} closed it: {reason}")

    def _close(self, reason: str) -> None:
        self._asking.flush_receipts()
        self._sharing.hurry()
        self._outbox.flush_all()
        self._say_goodbye(reason)

    def _say_goodbye(self, reason: str) -> None:
        said = fit(reason).encode()[:1000]
        self._outbox.add_control(pack_small(FrameType.GOODBYE, 0, said))
        self._outbox.flush_all()
        self._hang_up(first=True)
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        """Give up what was under way, once."""
        if self.closed:
            return
        self.closed = True
        self._reason = reason
        self._stop()
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
