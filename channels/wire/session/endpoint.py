"""Connecting and listening: on a Unix socket between processes of one host, on TCP between hosts.

A server distinguishes three kinds of sockets: those that have not proved the secret, which have
some seconds and one kilobyte to do it; those of new peers; and those on which a connection resumes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self, Unpack

from rlinf_async.channels.errors import ConnectionLost, WireError
from rlinf_async.channels.wire.session.address import (
    Address,
    TcpAddress,
    UnixAddress,
    bind_tcp,
    bind_unix,
    parse,
)
from rlinf_async.channels.wire.session.answers import Router
from rlinf_async.channels.wire.session.auth import NEW, Handshake, Terms
from rlinf_async.channels.wire.session.connection import Closed, Connection
from rlinf_async.channels.wire.session.dialing import Dialer
from rlinf_async.channels.wire.session.endpoint_options import EndpointOptions, Timeouts
from rlinf_async.channels.wire.session.pending_handshakes import PendingHandshakes
from rlinf_async.channels.wire.session.rejections import Rejections
from rlinf_async.channels.wire.session.socket_link import Link
from rlinf_async.channels.wire.session.tls import server_context
from rlinf_async.channels.wire.session.tls_accept import TlsAccept

NUMBER_BYTES: Final = len(NEW)
CLOSED: Final = "the server was closed"

Opened = Callable[[Connection], None]
Rejected = Callable[[WireError], None]


async def connect(
    address: str | os.PathLike[str],
    secret: bytes,
    *,
    name: str,
    router: Router,
    on_disconnect: Closed | None = None,
    **times: Unpack[Timeouts],
) -> Connection:
    """Connect to the process that serves this address, and prove the cluster's secret.

    Args:
        address: the path of a Unix socket, ``tcp://host:port``, or ``tls://host:port``.
        name: of this process, in the peer's errors and reports.
        times: see `Timeouts`.

    Raises:
        ValueError: an invalid time limit.
        WireError: the address is invalid, not a socket, or too long.
        ConnectionLost: nothing listens there, or every socket was cut in the handshake, for
            ``patience`` seconds.
        HandshakeFailed: the secret, or the protocol's version, differs.
    """
    side = EndpointOptions.of(secret, name, router, **times)
    connection = await Dialer(parse(address), side).connect()
    if on_disconnect is not None:
        connection.on_close(on_disconnect)
    return connection


class Server:
    """Accepts connections at one address. Made by `serve`."""

    def __init__(
        self,
        side: EndpointOptions,
        *,
        on_connect: Opened | None,
        on_disconnect: Closed | None,
        on_reject: Rejected | None,
    ) -> None:
        self.connections: set[Connection] = set()
        """those that were made and not lost, also those that are cut and may resume"""
        self._by_number: dict[bytes, Connection] = {}
        self._by_attempt: dict[bytes, Connection] = {}
        self._pending = PendingHandshakes()
        self._rejections = Rejections()
        self._side = side
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._on_reject = on_reject
        self._listener: asyncio.AbstractServer | None = None
        self._closing = False
        self._address: Address = UnixAddress(Path())

    @property
    def address(self) -> str:
        """Where to connect to. Port 0 was replaced by the port that was taken."""
        return str(self._address)

    @property
    def path(self) -> Path:
        """The Unix socket.

        Raises:
            WireError: it listens on TCP.
        """
        if not isinstance(self._address, UnixAddress):
            raise WireError(f"a server at {self.address} has no path: use its address")
        return self._address.path

    async def listen(self, address: Address) -> None:
        """Accept connections from now on.

        Raises:
            WireError: it is impossible to listen there.
        """
        loop = asyncio.get_running_loop()
        if isinstance(address, UnixAddress):
            listener = bind_unix(address)
            self._listener = await loop.create_unix_server(self._accept, sock=listener)
        else:
            context = server_context(self._side.secret) if address.tls else None
            listener = await _bind_in_thread(address)
            accept = self._accept if context is None else partial(self._accept_tls, context)
            try:
                self._listener = await loop.create_server(accept, sock=listener)
            except BaseException:
                listener.close()
                raise
            address = address._replace(port=listener.getsockname()[1])
        self._address = address

    async def close(self) -> None:
        """Close every connection and remove the socket."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        cut = [connection for connection in self.connections if connection.reconnecting]
        for connection in cut:  # it can come back only while somebody listens
            connection.close(CLOSED)
        await asyncio.gather(*(connection.wait_closed() for connection in cut))
        self._closing = True
        await self._stop_accepting(listener)
        if isinstance(self._address, UnixAddress) and not self._address.abstract:
            with contextlib.suppress(FileNotFoundError):
                self._address.path.unlink()
        every, unauthenticated = list(self.connections), list(self._pending)
        for connection in every:
            connection.close(CLOSED)
        for link in unauthenticated:
            link.refuse(CLOSED)
        await asyncio.gather(*(connection.wait_closed() for connection in every))
        await asyncio.gather(*(link.ended for link in unauthenticated))
        self._rejections.count()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # ---- accepting

    async def _stop_accepting(self, listener: asyncio.AbstractServer) -> None:
        """Close the listener, but not before what it has accepted has its link.

        asyncio makes the transport in the turn after the one that accepts, and loses the socket if
        the listener is closed between the two. It calls the link's ``connection_made`` one later.
        uvloop does all of it at once, and has no reader of a listener that could be removed.
        """
        loop = asyncio.get_running_loop()
        for one in getattr(listener, "sockets", ()):
            loop.remove_reader(one.fileno())
        for _ in range(2):
            await asyncio.sleep(0)
        listener.close()

    def _accept(self) -> Link:
        made: list[Connection] = []
        side = self._side
        handshake = Handshake("server", side.secret, side.name, settle=partial(self._settle, made))
        link = Link(
            handshake, side.handshake_timeout, lambda _: made[0].streams, self._pending.arrived
        )
        self._pending.add(link)
        link.start_timer()
        link.opened.add_done_callback(partial(self._known, link, made))
        return link

    def _accept_tls(self, context: ssl.SSLContext) -> TlsAccept:
        return TlsAccept(self._accept(), context, self._side.handshake_timeout)

    def _settle(self, made: list[Connection], handshake: Handshake) -> Terms:
        """The connection of this peer: a new one, or the one that it resumes."""
        asked = handshake.terms
        begun = self._by_attempt.get(asked.attempt) if asked.number == NEW else None
        if begun is not None and begun.peer == handshake.peer and not begun.received_bytes:
            connection, number = begun, begun.number  # the answer to its last try did not arrive
            connection.streams.drop_link()
        elif asked.number == NEW:
            number = os.urandom(NUMBER_BYTES)
            connection = self._side.connection(handshake.peer, number, asked.patience)
        else:
            number = asked.number
            found = self._by_number.get(number)
            if found is None or found.peer != handshake.peer:
                raise handshake.refuse("this process does not know its connection (any more)")
            connection = found
            connection.streams.drop_link()
        made.append(connection)
        return Terms(number, connection.received_bytes, self._side.patience)

    def _known(self, link: Link, made: list[Connection], opened: asyncio.Future[None]) -> None:
        self._pending.remove(link)
        error = None if opened.cancelled() else opened.exception()
        if isinstance(error, WireError):
            self._reject(error)
            return
        connection = made[0]
        if connection.number in self._by_number:
            return
        if connection.closed:
            self._reject(ConnectionLost(f"{connection.peer} left right after the handshake"))
            return
        self.connections.add(connection)
        self._by_number[connection.number] = connection
        attempt = link.handshake.terms.attempt
        self._by_attempt[attempt] = connection
        connection.on_close(partial(self._ended, attempt))
        if self._on_connect is not None:
            self._on_connect(connection)
        if self._closing:  # accepted in the turn in which the others were closed
            connection.close(CLOSED)

    def _reject(self, error: WireError) -> None:
        self._rejections.add(self.address, error)
        if self._on_reject is not None:
            self._on_reject(error)

    def _ended(self, attempt: bytes, connection: Connection, reason: str) -> None:
        self.connections.discard(connection)
        self._by_attempt.pop(attempt, None)
        self._by_number.pop(connection.number, None)
        if self._on_disconnect is not None:
            self._on_disconnect(connection, reason)


async def _bind_in_thread(address: TcpAddress) -> socket.socket:
    """As `bind_tcp`, which looks a name up and so takes its time. Where this is cancelled, the
    thread goes on, and what it has made is closed."""
    binding = asyncio.get_running_loop().run_in_executor(None, bind_tcp, address)
    try:
        return await asyncio.shield(binding)
    except asyncio.CancelledError:
        binding.add_done_callback(_close_bound)
        raise


def _close_bound(binding: asyncio.Future[socket.socket]) -> None:
    if not binding.cancelled() and binding.exception() is None:
        binding.result().close()


async def serve(
    address: str | os.PathLike[str],
    secret: bytes,
    *,
    router: Router,
    name: str = "server",
    on_connect: Opened | None = None,
    on_disconnect: Closed | None = None,
    on_reject: Rejected | None = None,
    **times: Unpack[Timeouts],
) -> Server:
    """Serve a Unix socket that only this user can reach, or a port of one of this host's addresses.

    Args:
        address: where the socket is made; its folder is made too, and must be this user's alone. Or
            ``tcp://host:port``: it listens at this address and at no other. Or ``tls://``, as the
            peers then have to write too.
        on_connect: called with each connection once it has proved the secret.
        on_disconnect: called with it, and the reason, when it is closed or lost.
        on_reject: called whenever a peer could not prove it. (`Rejections` logs the first few of
            a minute, and the number of the others.)
        times: see `Timeouts`.

    Raises:
        ValueError: the secret is too short, or a time limit is invalid.
        WireError: the address is invalid or in use, or other users can reach it.
    """
    server = Server(
        EndpointOptions.of(secret, name, router, **times),
        on_connect=on_connect,
        on_disconnect=on_disconnect,
        on_reject=on_reject,
    )
    await server.listen(parse(address))
    return server
