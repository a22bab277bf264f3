"""One socket: first the handshake, then the bytes of a connection.

A connection outlives its sockets (see `Connection`). A link has one user from the moment on at
which its peer is known, and none again once it was cut or dropped: later bytes are ignored.

::

    greeting --proved--> carrying --cut, dropped, hung up--> over
        +---- refused, late, cut --------------------------^
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Final, Protocol, cast

from rlinf_async.channels.errors import ConnectionLost, HandshakeFailed, WireError, error_text
from rlinf_async.channels.wire.session.auth import Handshake
from rlinf_async.channels.wire.session.busy_poll import busy_poll
from rlinf_async.channels.wire.session.hangup import HangUp
from rlinf_async.deadlines import Timer

CLOSED = "the other process closed it or died"
READ_BYTES: Final = 256 * 1024
"""are read at a time, at most, where it is not known where they belong"""
_of_thread: Final = threading.local()


class HandshakeTimeout(HandshakeFailed):
    """The handshake took too long. Another one may be faster."""


class LinkUser(Protocol):
    """What reads and writes a link."""

    def carry(self, link: Link, arrived: int) -> None: ...

    def data_received(self, data: bytes) -> None: ...

    def space(self) -> memoryview | None: ...

    def filled(self, count: int) -> None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def cut(self, link: Link, reason: str) -> None: ...


class Link(asyncio.BufferedProtocol):
    """A socket whose other side proves the secret.

    Args:
        seconds: time limit of the handshake.
        greeted: called when it is done; gives the user of this link.
        arrived: called when there is a socket.
    """

    def __init__(
        self,
        handshake: Handshake,
        seconds: float,
        greeted: Callable[[Link], LinkUser],
        arrived: Callable[[Link, asyncio.BaseTransport], None] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.handshake = handshake
        self.opened: asyncio.Future[None] = loop.create_future()
        """done when the handshake is; with `HandshakeFailed` or `ConnectionLost` if it failed"""
        self.ended: asyncio.Future[None] = loop.create_future()
        """done when the socket is closed, or was given up before it was made"""
        self._greeted = greeted
        self._arrived = arrived
        self._user: LinkUser | None = None
        self._transport: asyncio.Transport | None = None
        self._plain: socket.socket | None = None
        self._seconds = seconds
        self._late_timer: Timer | None = None
        self._hanging = HangUp()
        self._poll = busy_poll(loop)
        self._scratch = _read_buffer()
        self._space: memoryview | None = None  # what the bytes that are read now go to

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._transport

    @property
    def user(self) -> LinkUser | None:
        return self._user

    @property
    def peer(self) -> str:
        return self.handshake.peer

    def start_timer(self) -> None:
        """Limit the time of the handshake from now on; where TLS comes first, of that too."""
        if self._late_timer is None:
            self._late_timer = Timer(self._seconds, self._late)

    def refuse(self, reason: str) -> None:
        """Refuse a peer that has not proved the secret yet."""
        if not self.opened.done():
            self._fail(self.handshake.refuse(reason))

    def evict(self, reason: str) -> None:
        """Close on a peer that has not proved the secret yet, without a refusal: it may try again.

        A refusal is final, and a flood of other sockets must not end a peer that reconnects.
        """
        if not self.opened.done():
            self._fail(ConnectionLost(reason))

    def hang_up(self, *, first: bool = False) -> None:
        """Close the socket once the peer took what was sent, or takes nothing any more.

        ``first``: whether the peer is still to be notified, which this does.
        """
        self._user = None
        if self._transport is not None:
            self._hanging.start(self._transport, self.peer, first=first)

    def drop(self) -> None:
        """Close the socket at once; what was sent may not arrive."""
        self._user = None
        self._in_time()
        self.opened.cancel()
        self._abort()

    def accepted(self, transport: asyncio.BaseTransport, plain: socket.socket) -> None:
        """There is a socket, over which TLS begins now."""
        self._plain = plain
        self.start_timer()
        if self.opened.done():  # given up before it was made
            self._abort()
        elif self._arrived is not None:
            self._arrived(self, transport)

    # ---- callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not of that class
        found: socket.socket | None = transport.get_extra_info("socket")
        if found is not None and found.family != socket.AF_UNIX:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.opened.done():  # given up before it was made
            self._transport.abort()
        else:
            self.start_timer()
            self._transport.write(self.handshake.take_outgoing())
            if self._arrived is not None and self._plain is None:
                self._arrived(self, self._transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: straight to where they belong, where the user knows that."""
        user = self._user
        self._space = None if user is None else user.space()
        return self._scratch if self._space is None else self._space

    def buffer_updated(self, nbytes: int) -> None:
        user, straight, self._space = self._user, self._space is not None, None
        if user is None:
            if not self.opened.done():
                self._greet(bytes(self._scratch[:nbytes]))
            return
        if straight:
            user.filled(nbytes)
        else:
            user.data_received(bytes(self._scratch[:nbytes]))
        if self._poll is not None:
            self._poll.heard()

    def pause_writing(self) -> None:
        if self._user is not None:
            self._user.pause_writing()

    def resume_writing(self) -> None:
        if self._user is not None:
            self._user.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        reason = error_text(exc) if exc else CLOSED
        self._in_time()
        self._hanging.stop()
        self._transport = None
        if not self.opened.done():
            self.opened.set_exception(ConnectionLost(f"it was lost in the handshake: {reason}"))
        user, self._user = self._user, None
        if user is not None:
            user.cut(self, reason)
        self._end()

    # ---- the handshake

    def _greet(self, data: bytes) -> None:
        failure: WireError | None = None
        try:
            self.handshake.feed(data)
        except HandshakeFailed as error:
            failure = error
        if failure is not None:
            self._fail(failure)
            return
        if self._transport is not None and (answer := self.handshake.take_outgoing()):
            self._transport.write(answer)
        if self.handshake.done:
            self._in_time()
            self.opened.set_result(None)
            user = self._user = self._greeted(self)
            user.carry(self, self.handshake.terms.received)
            if rest := self.handshake.rest:
                user.data_received(rest)

    def _in_time(self) -> None:
        if self._late_timer is not None:
            self._late_timer.cancel()

    def _late(self) -> None:
        self._fail(HandshakeTimeout(f"no handshake within {self._seconds:g} seconds"))

    def _fail(self, error: WireError) -> None:
        if self._transport is not None and (answer := self.handshake.take_outgoing()):
            self._transport.write(answer)
        self._in_time()
        self.opened.set_exception(error)
        if self._transport is None:  # TLS is not through, and perhaps never will be
            self._abort()
            self._end()
        self.hang_up()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        elif self._plain is not None:
            with contextlib.suppress(OSError):  # it is closed
                self._plain.shutdown(socket.SHUT_RDWR)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _read_buffer() -> memoryview:
    """The one of this thread: what is read into it is taken out before anything else is read."""
    found: memoryview | None = getattr(_of_thread, "buffer", None)
    if found is None:
        found = _of_thread.buffer = memoryview(bytearray(READ_BYTES))
    return found
