"""What one side of a connection asks and tells the other. See `Connection`."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import ConnectionLost
from rlinf_async.channels.waitfor import WaitFuture
from rlinf_async.channels.wire.frames.framing import FrameType
from rlinf_async.channels.wire.frames.messages import CONTROL, DATA, Message
from rlinf_async.channels.wire.session.failures import UNREADABLE
from rlinf_async.channels.wire.session.heartbeat import Heartbeat
from rlinf_async.channels.wire.session.reconnect import Again
from rlinf_async.channels.wire.session.requests import (
    Answer,
    Asking,
    Waiting,
    head_of,
    reply_decoder,
)
from rlinf_async.channels.wire.session.streams import Streams

R = TypeVar("R")
_NOTICE = FrameType.NOTICE  # the enum is slow to ask


class Talking(Streams):
    """The part of a connection by which requests and notices go out.

    Args:
        peer, patience, redial: as of `Streams`.
    """

    def __init__(
        self, heartbeat: Heartbeat, *, peer: str, patience: float, redial: Again | None
    ) -> None:
        super().__init__(heartbeat, peer=peer, patience=patience, redial=redial)
        self._asking = Asking(self._outbox)
        self._reason = ""

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
        if self.closed:
            raise self._lost()
        future: asyncio.Future[Message] = (
            WaitFuture(loop=self._loop) if on_channel else self._loop.create_future()
        )
        head = head_of(kind, meta)
        number = self._asking.ask(future, kind, head, body, CONTROL if control else DATA)
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

    def post(
        self,
        waiting: Waiting,
        kind: str,
        head: bytes,
        body: Encoded | None = None,
        *,
        control: bool = False,
    ) -> int:
        """As `ask`, for one who is told the answer as soon as it arrives; the request's number.
        ``head`` is what `head_of` makes of its kind and its arguments.

        An answer that cannot be read is told as such, and raised on: the connection ends by it.
        """
        if self.closed:
            raise self._lost()
        return self._asking.ask(waiting, kind, head, body, CONTROL if control else DATA)

    def give_up(self, number: int) -> bool:
        """The answer to this `post` is wanted no more; the peer's handler is cancelled. Whether the
        peer never heard of it."""
        return not self.closed and self._asking.cancel(number)

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
        self._outbox.send(_NOTICE, 0, head_of(kind, meta), body, lane, flags=flags, what=kind)

    # ---- inside

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"connection to {self.peer or 'a peer'!r} was lost: {self._reason}")
