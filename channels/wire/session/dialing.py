"""Connecting to an address, and connecting again after a cut."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from rlinf_async import deadlines
from rlinf_async.channels.errors import ConnectionLost, HandshakeFailed, WireError
from rlinf_async.channels.wire.session.address import Address, TcpAddress, UnixAddress
from rlinf_async.channels.wire.session.auth import Handshake, Terms
from rlinf_async.channels.wire.session.connection import Connection
from rlinf_async.channels.wire.session.endpoint_options import EndpointOptions
from rlinf_async.channels.wire.session.hangup import GRACE_SECONDS
from rlinf_async.channels.wire.session.socket_link import HandshakeTimeout, Link
from rlinf_async.channels.wire.session.streams import Streams
from rlinf_async.channels.wire.session.tls import client_context

ATTEMPT_BYTES: Final = 16
FIRST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 1.0
"""Seconds between two tries to connect again."""


class NotListening(ConnectionLost):
    """Nothing listens at this address (any more): trying again is of no use."""


class HandshakeCut(ConnectionLost):
    """The socket was closed in the handshake: another one may succeed."""


class Dialer:
    """Makes a connection to one address, and resumes it after a cut."""

    def __init__(self, address: Address, side: EndpointOptions) -> None:
        self._address = address
        self._side = side

    async def connect(self) -> Connection:
        """A new connection. A socket that is closed in the handshake, as where the server is busy
        with many unauthenticated sockets, is replaced by others for as long as the side has
        patience.

        Raises:
            ConnectionLost: nothing listens there, or it was cut.
            HandshakeFailed: the secret, or the protocol's version, differs.
        """
        attempt, patience = os.urandom(ATTEMPT_BYTES), self._side.patience
        try:
            return await self._connect(attempt)
        except HandshakeCut as error:
            if not patience:
                raise
            why: HandshakeCut = error
        pause = FIRST_PAUSE
        try:
            async with deadlines.timeout(patience):
                while True:
                    await asyncio.sleep(pause)
                    try:
                        return await self._connect(attempt)
                    except HandshakeCut as error:
                        why = error
                    pause = min(2 * pause, LONGEST_PAUSE)
        except TimeoutError:
            raise HandshakeCut(f"{why}; it was tried again for {patience:g} s") from why

    async def _connect(self, attempt: bytes) -> Connection:
        """Try it once. What is cancelled leaves nothing, here and at the server."""
        side, made = self._side, list[Connection]()

        def greeted(link: Link) -> Streams:
            terms = link.handshake.terms
            made.append(side.connection(link.peer, terms.number, terms.patience, self._redial))
            return made[0].streams

        terms = Terms(patience=side.patience, attempt=attempt)
        link = self._link(terms, greeted, side.handshake_timeout)
        try:
            await self._dial(link, side.handshake_timeout)
        except asyncio.CancelledError:
            await _take_back(link, made)
            raise
        finally:
            if link.user is None:
                link.drop()
        return made[0]

    async def _redial(self, connection: Connection) -> None:
        pause = FIRST_PAUSE
        while connection.reconnecting:
            terms = Terms(
                connection.number, connection.received_bytes, connection.reconnection.patience
            )
            timeout = max(
                min(self._side.handshake_timeout, connection.reconnection.left), FIRST_PAUSE
            )
            try:
                link = self._link(terms, partial(_as_before, connection), timeout)
                try:
                    await self._dial(link, timeout)
                finally:
                    if link.user is None:
                        link.drop()
            except HandshakeTimeout:
                continue
            except (NotListening, HandshakeFailed) as error:
                connection.reconnection.give_up(str(error))
            except ConnectionLost:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _link(self, terms: Terms, greeted: Callable[[Link], Streams], timeout: float) -> Link:
        handshake = Handshake("client", self._side.secret, self._side.name, terms=terms)
        return Link(handshake, timeout, greeted)

    async def _dial(self, link: Link, timeout: float) -> None:
        try:
            async with deadlines.timeout(timeout):
                await self._open(link)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise NotListening(self._say(error)) from error
        except ConnectionResetError as error:
            raise HandshakeCut(self._say(error)) from error
        except ssl.SSLError as error:
            raise HandshakeFailed(
                f"no TLS session with {str(self._address)!r}: {error.reason or error}: does the "
                "process there use TLS, with the same secret?"
            ) from error
        except OSError as error:
            raise ConnectionLost(self._say(error)) from error
        try:
            await asyncio.shield(link.opened)  # it goes on if this is cancelled, see `_take_back`
        except ConnectionLost as error:
            plain = isinstance(self._address, TcpAddress) and not self._address.tls
            unknown = plain and not link.handshake.introduced
            hint = ", or expects TLS (tls:// instead of tcp://)" if unknown else ""
            raise HandshakeCut(f"{error}{hint}") from error

    async def _open(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(self._address, UnixAddress):
            connected = await _unix_socket(self._address)
            try:
                transport, _ = await loop.create_unix_connection(lambda: link, sock=connected)
            except BaseException:
                connected.close()
                raise
            if not isinstance(transport, asyncio.Transport):
                connected.detach()  # uvloop's own the descriptor, see `_unix_socket`
        else:
            options: dict[str, Any] = {}
            if self._address.tls:
                options["ssl"] = client_context(self._side.secret)
                options["ssl_handshake_timeout"] = self._side.handshake_timeout
            host, port = self._address.host, self._address.port
            await loop.create_connection(lambda: link, host, port, **options)

    def _say(self, error: OSError) -> str:
        why = error.strerror or str(error) or "no answer in time"
        return (
            f"cannot connect to {str(self._address)!r}: {why}: is the process that serves it "
            "running?"
        )


async def _unix_socket(address: UnixAddress) -> socket.socket:
    """A socket that is connected to this address. (uvloop cannot connect to an abstract name.)

    A transport of uvloop closes its descriptor, and forgets to tell the socket if it does so before
    ``create_unix_connection`` has returned: later that would close what has the same number then.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    try:
        while True:
            try:
                made.connect(address.name)
            except BlockingIOError:  # many connect just now: there is nothing to wait for
                await asyncio.sleep(FIRST_PAUSE)
            else:
                return made
    except BaseException:
        made.close()
        raise


async def _take_back(link: Link, made: list[Connection]) -> None:
    """The connection is not wanted any more: notify the server, which may have accepted it."""
    if not made and link.handshake.introduced:  # the server may be about to make it
        with contextlib.suppress(TimeoutError, WireError):
            async with deadlines.timeout(GRACE_SECONDS):
                await asyncio.shield(link.opened)
    for connection in made:
        connection.abort("whoever connected gave up")
        try:
            await connection.wait_closed()  # soon: the server closes the socket, or it is cut off
        except asyncio.CancelledError:
            link.drop()
            raise


def _as_before(connection: Connection, link: Link) -> Streams:
    return connection.streams
