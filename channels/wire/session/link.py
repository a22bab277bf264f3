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
import hmac
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple, Protocol, cast

from rlinf_async.channels.errors import ConnectionLost, HandshakeFailed, WireError, error_text
from rlinf_async.channels.wire.frames import PROTOCOL_VERSION, Message, MessageReader
from rlinf_async.deadlines import ProgressTimer, Timer

MAGIC: Final = b"rlinf-async"
NONCE_BYTES: Final = 32
MIN_SECRET_BYTES: Final = 16
MAX_NAME_BYTES: Final = 256
MAX_MESSAGE: Final = 1024
PREFIX: Final = struct.Struct("<BH")
VERSION: Final = struct.Struct("<H")
TERMS: Final = struct.Struct("<16sQd16s")
PROOF_BYTES: Final = 32
HELLO_BYTES: Final = len(MAGIC) + VERSION.size + NONCE_BYTES + TERMS.size
NEW: Final = bytes(16)
"""The number of a connection that does not exist yet."""

HELLO, PROOF, REFUSED = 1, 2, 3


class Terms(NamedTuple):
    """What a side says of the connection that a socket is for."""

    number: bytes = NEW
    """number of the connection, 16 random bytes that the server chose"""
    received: int = 0
    """bytes of it that arrived so far"""
    patience: float = 0.0
    """seconds for which a cut connection is kept; a connection has the lower of both sides'"""
    attempt: bytes = bytes(16)
    """the client's, random: all sockets with which it tries to make one new connection say the
    same"""


Settle = Callable[["Handshake"], Terms]
"""The server's: called once the client is known, gives the terms. May raise `HandshakeFailed`."""


def check_secret(secret: bytes) -> None:
    """Refuse a secret that could be guessed.

    Raises:
        ValueError: it is too short.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"the cluster's secret has {len(secret)} bytes, it needs {MIN_SECRET_BYTES} or more: "
            "make one with secrets.token_bytes(32)"
        )


class Handshake:
    """One side of the exchange by which both sides prove that they know the cluster's secret.

    Pure: no socket, no clock. Feed it what arrives, send what `take_outgoing` gives::

        client                                            server
          HELLO  magic, version, nonce, terms, name  ------>
          <------  magic, version, nonce, terms, name  HELLO
          PROOF  HMAC(secret, "client", both hellos)  ----->      wrong: REFUSED with the reason
          <-  HMAC(secret, "server", both hellos, terms), terms  PROOF

    Nothing else is read before. Each message is a byte of type, two of length, and at most
    `MAX_MESSAGE` bytes. The secret itself never travels; the nonces make every proof good for one
    socket, the two labels keep a proof from being sent back to its maker, and the proofs cover
    version, names and `Terms`: whether this is a new connection, or one that goes on after a cut.

    The server gives its terms last, when it knows who asks: an unauthenticated client cannot
    disturb a connection.

    Args:
        terms: terms that the client asks for.
        settle: returns the terms that the server answers.
    """

    def __init__(
        self,
        role: Literal["client", "server"],
        secret: bytes,
        name: str,
        version: int | None = None,
        *,
        terms: Terms | None = None,
        settle: Settle | None = None,
    ) -> None:
        check_secret(secret)
        self.role = role
        self.peer = ""
        """the other side's name, known to be true once `done`"""
        self.terms = Terms()
        """the other side's, known to be true once `done`"""
        self.done = False
        self.rest = b""
        """what arrived behind the handshake"""
        self._secret = secret
        self._version = PROTOCOL_VERSION if version is None else version
        self._settle = settle
        encoded = name.encode()[:MAX_NAME_BYTES]
        self._hello = b"".join(
            (
                MAGIC,
                VERSION.pack(self._version),
                os.urandom(NONCE_BYTES),
                TERMS.pack(*(terms or Terms())),
                encoded,
            )
        )
        self._peer_hello = b""
        self._received = b""
        self._outgoing = _pack(HELLO, self._hello) if role == "client" else b""

    @property
    def introduced(self) -> bool:
        """Whether the other side speaks this protocol. Anybody can."""
        return bool(self._peer_hello)

    def take_outgoing(self) -> bytes:
        """What is to be sent now."""
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def feed(self, received: bytes) -> None:
        """Go on with what arrived.

        Raises:
            HandshakeFailed: the other side cannot be trusted or understood. What `take_outgoing`
                gives then tells it why.
        """
        self._received += received
        while not self.done and len(self._received) >= PREFIX.size:
            kind, length = PREFIX.unpack_from(self._received)
            if kind not in (HELLO, PROOF, REFUSED) or length > MAX_MESSAGE:
                raise self.refuse("it does not speak this protocol")
            stop = PREFIX.size + length
            if len(self._received) < stop:
                break
            payload, self._received = self._received[PREFIX.size : stop], self._received[stop:]
            self._handle(kind, payload)
        if self.done:
            self.rest, self._received = self._received, b""

    def refuse(self, reason: str) -> HandshakeFailed:
        """Tell the other side why it is turned away; the error to raise here."""
        self._outgoing += _pack(REFUSED, reason.encode()[:MAX_MESSAGE])
        who = f" ({self.peer!r})" if self.peer else ""
        return HandshakeFailed(f"the {self._other}{who} was refused: {reason}")

    # ---- inside

    def _handle(self, kind: int, payload: bytes) -> None:
        if kind == REFUSED:
            raise HandshakeFailed(f"the {self._other} refused: {payload.decode(errors='replace')}")
        if kind == HELLO and not self._peer_hello:
            self._handle_hello(payload)
        elif kind == PROOF and self._peer_hello:
            self._handle_proof(payload)
        else:
            raise self.refuse("it does not follow the handshake")

    def _handle_hello(self, payload: bytes) -> None:
        if not payload.startswith(MAGIC) or len(payload) < len(MAGIC) + VERSION.size:
            raise self.refuse("it does not speak this protocol")
        (version,) = VERSION.unpack_from(payload, len(MAGIC))
        if version != self._version:  # first of all: the rest may look different there
            raise self.refuse(
                f"protocol versions differ: the {self._other} speaks {version}, the {self.role} "
                f"{self._version}; run the same rlinf_async on both sides"
            )
        if len(payload) < HELLO_BYTES:
            raise self.refuse("its greeting is too short")
        self._peer_hello = payload
        self.peer = payload[HELLO_BYTES:].decode(errors="replace")
        if self.role == "client":
            self._outgoing += _pack(PROOF, self._proof("client"))
        else:
            self.terms = Terms(*TERMS.unpack_from(payload, HELLO_BYTES - TERMS.size))
            self._outgoing += _pack(HELLO, self._hello)

    def _handle_proof(self, payload: bytes) -> None:
        proof, terms = payload[:PROOF_BYTES], payload[PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(self._other, terms)):
            raise self.refuse("the cluster's secret is wrong")
        if self.role == "server":
            ours = TERMS.pack(*self._settle(self)) if self._settle else TERMS.pack(*Terms())
            self._outgoing += _pack(PROOF, self._proof("server", ours) + ours)
        elif len(terms) == TERMS.size:
            self.terms = Terms(*TERMS.unpack(terms))
        else:
            raise self.refuse("it does not follow the handshake")
        self.done = True

    def _proof(self, role: str, terms: bytes = b"") -> bytes:
        hellos = (self._hello, self._peer_hello)
        client, server = hellos if self.role == "client" else reversed(hellos)
        parts = (role.encode(), client, server, terms)
        sized = (struct.pack("<I", len(part)) + part for part in parts)
        return hmac.digest(self._secret, b"".join(sized), "sha256")

    @property
    def _other(self) -> str:
        return "server" if self.role == "client" else "client"


def _pack(kind: int, payload: bytes) -> bytes:
    return PREFIX.pack(kind, len(payload)) + payload


FAR_SECONDS: float = 0.002
"""Round trips from here on are worth larger windows, and copies: see `Connection.far`."""
_TCP_INFO: Final = getattr(socket, "TCP_INFO", None)
_ROUND_TRIP: Final = struct.Struct("68xI")
"""the smoothed round trip in Linux's ``struct tcp_info``, in microseconds"""
_ACKNOWLEDGED: Final = struct.Struct("120xQ")
"""the bytes there that the other side has acknowledged"""


def round_trip(transport: asyncio.BaseTransport | None) -> float:
    """Seconds; 0 over a Unix socket, without a socket, and where the system does not say."""
    return _ask(transport, _ROUND_TRIP) / 1e6


def acknowledged_bytes(transport: asyncio.BaseTransport | None) -> int:
    """Bytes that the other side's system has taken; 0 where `round_trip` is."""
    return _ask(transport, _ACKNOWLEDGED)


def _ask(transport: asyncio.BaseTransport | None, field: struct.Struct) -> int:
    found: socket.socket | None = None if transport is None else transport.get_extra_info("socket")
    if found is None or _TCP_INFO is None or found.family == socket.AF_UNIX:
        return 0
    try:
        info = found.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, field.size)
    except OSError:
        return 0
    value: int = field.unpack(info)[0] if len(info) == field.size else 0
    return value


log = logging.getLogger(__name__)
GRACE_SECONDS: Final = 2.0
"""Time without progress after which a peer is cut off."""


class HangUp:
    """Closes a transport when all was sent, or cuts it off when nothing more gets through."""

    def __init__(self) -> None:
        self._timer: ProgressTimer | None = None

    def start(self, transport: asyncio.WriteTransport, peer: str, *, first: bool = False) -> None:
        """Close it; what was written before is still sent.

        ``first``: the peer does not know yet. It may be writing, and would take an error there for
        the end before it has read all; so it is left to close the socket, once it has read that it
        should. (A socket with TLS that is closed here drops what is queued as soon as the peer
        writes anything.)
        """
        if not first:
            transport.close()
        elif transport.can_write_eof():
            try:
                transport.write_eof()
            except OSError:  # it has just reset the socket, which the loop has not seen yet
                transport.abort()
                return
        self.stop()
        self._timer = ProgressTimer(
            GRACE_SECONDS,
            lambda: (transport.get_write_buffer_size(), acknowledged_bytes(transport)),
            lambda _: self._cut_off(transport, peer),
        )

    def stop(self) -> None:
        """Stop waiting: the socket is closed."""
        if self._timer is not None:
            self._timer.cancel()

    def _cut_off(self, transport: asyncio.WriteTransport, peer: str) -> None:
        if transport.get_write_buffer_size():
            log.warning("%s took nothing for %g s: it is cut off", peer, GRACE_SECONDS)
        transport.abort()


CLOSED = "the other process closed it or died"
READ_BYTES: Final = 256 * 1024
"""most bytes that are read at a time, where it is not known where they belong"""
_of_thread: Final = threading.local()


class HandshakeTimeout(HandshakeFailed):
    """The handshake took too long. Another one may be faster."""


class LinkUser(Protocol):
    """What reads and writes a link."""

    reader: MessageReader

    def carry(self, link: Link, arrived: int) -> None: ...

    def received(self, count: int, messages: Iterator[Message]) -> None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def cut(self, link: Link, reason: str) -> None: ...


class Link(asyncio.BufferedProtocol):
    """A socket whose other side proves the secret.

    Args:
        seconds: time limit of the handshake.
        greeted: called when it is done; gives the user of this link.
    """

    def __init__(
        self,
        handshake: Handshake,
        seconds: float,
        greeted: Callable[[Link], LinkUser],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.handshake = handshake
        self.opened: asyncio.Future[None] = loop.create_future()
        """done when the handshake is; with `HandshakeFailed` or `ConnectionLost` if it failed"""
        self.ended: asyncio.Future[None] = loop.create_future()
        """done when the socket is closed, or was given up before it was made"""
        self._greeted = greeted
        self.user: LinkUser | None = None
        """what reads and writes it"""
        self.transport: asyncio.Transport | None = None
        """transport of the current socket; None while there is none"""
        self._plain: socket.socket | None = None
        self._seconds = seconds
        self._late_timer: Timer | None = None
        self._hanging = HangUp()
        self._scratch = _read_buffer()
        self._space: memoryview | None = None  # what the bytes that are read now go to

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
        self.user = None
        if self.transport is not None:
            self._hanging.start(self.transport, self.peer, first=first)

    def drop(self) -> None:
        """Close the socket at once; what was sent may not arrive."""
        self.user = None
        self._in_time()
        self.opened.cancel()
        self._abort()

    def accepted(self, plain: socket.socket) -> None:
        """Take a socket, over which TLS begins now."""
        self._plain = plain
        self.start_timer()
        if self.opened.done():  # given up before it was made
            self._abort()

    # ---- callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are not of that class
        found: socket.socket | None = transport.get_extra_info("socket")
        if found is not None and found.family != socket.AF_UNIX:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.opened.done():  # given up before it was made
            self.transport.abort()
        else:
            self.start_timer()
            self.transport.write(self.handshake.take_outgoing())

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: straight to where they belong, where that is known."""
        user, self._space = self.user, None
        if user is not None and user.reader.incoming is not None:
            self._space = user.reader.space()
        return self._scratch if self._space is None else self._space

    def buffer_updated(self, nbytes: int) -> None:
        user, space, self._space = self.user, self._space, None
        if user is None:
            if not self.opened.done():
                self._greet(bytes(self._scratch[:nbytes]))
        elif space is None:
            user.received(nbytes, user.reader.feed(bytes(self._scratch[:nbytes])))
        else:
            user.received(nbytes, user.reader.filled(nbytes))

    def pause_writing(self) -> None:
        if self.user is not None:
            self.user.pause_writing()

    def resume_writing(self) -> None:
        if self.user is not None:
            self.user.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        reason = error_text(exc) if exc else CLOSED
        self._in_time()
        self._hanging.stop()
        self.transport = None
        if not self.opened.done():
            self.opened.set_exception(ConnectionLost(f"it was lost in the handshake: {reason}"))
        user, self.user = self.user, None
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
        if self.transport is not None and (answer := self.handshake.take_outgoing()):
            self.transport.write(answer)
        if self.handshake.done:
            self._in_time()
            self.opened.set_result(None)
            user = self.user = self._greeted(self)
            user.carry(self, self.handshake.terms.received)
            if rest := self.handshake.rest:
                user.received(len(rest), user.reader.feed(rest))

    def _in_time(self) -> None:
        if self._late_timer is not None:
            self._late_timer.cancel()

    def _late(self) -> None:
        self._fail(HandshakeTimeout(f"no handshake within {self._seconds:g} seconds"))

    def _fail(self, error: WireError) -> None:
        if self.transport is not None and (answer := self.handshake.take_outgoing()):
            self.transport.write(answer)
        self._in_time()
        self.opened.set_exception(error)
        if self.transport is None:  # TLS is not through, and perhaps never will be
            self._abort()
            self._end()
        self.hang_up()

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        elif self._plain is not None:
            with contextlib.suppress(OSError):  # it is closed
                self._plain.shutdown(socket.SHUT_RDWR)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _read_buffer() -> memoryview:
    """Return the buffer of this thread: what is read into it is taken out before anything else is
    read."""
    found: memoryview | None = getattr(_of_thread, "buffer", None)
    if found is None:
        found = _of_thread.buffer = memoryview(bytearray(READ_BYTES))
    return found
