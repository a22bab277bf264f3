"""Connecting and listening on Unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rlinf_async.channels.errors import ConnectionLost, HandshakeFailed, WireError
from rlinf_async.channels.wire.auth import Handshake, check_secret
from rlinf_async.channels.wire.connection import Closed, Connection
from rlinf_async.channels.wire.heartbeat import HEARTBEAT_LIMIT, Heartbeat
from rlinf_async.channels.wire.router import Router

MAX_PATH_BYTES: Final = 107
HANDSHAKE_SECONDS: Final = 10.0

log = logging.getLogger(__name__)
Opened = Callable[[Connection], None]
Rejected = Callable[[WireError], None]


async def connect(
    path: str | os.PathLike[str],
    secret: bytes,
    *,
    name: str,
    router: Router,
    heartbeat_interval: float | None = None,
    heartbeat_limit: float = HEARTBEAT_LIMIT,
    handshake_timeout: float = HANDSHAKE_SECONDS,
    on_disconnect: Closed | None = None,
) -> Connection:
    """Connect to the process that serves this socket, and prove that we belong to its cluster.

    Args:
        name: who we are, in the peer's errors and reports.
        heartbeat_interval: seconds between signs of life; by default as the limit needs it.
        heartbeat_limit: seconds without one after which the peer is given up.

    Raises:
        WireError: the path is no socket, or too long.
        ConnectionLost: nobody serves it, or it was cut.
        HandshakeFailed: the secret, or the protocol's version, differs.
    """
    check_path(path)
    make = partial(
        Connection,
        router,
        Handshake("client", secret, name),
        Heartbeat.of(heartbeat_limit, heartbeat_interval),
        handshake_timeout,
    )
    try:
        _, connection = await asyncio.get_running_loop().create_unix_connection(
            make, os.fspath(path)
        )
    except OSError as error:
        raise ConnectionLost(
            f"cannot connect to {os.fspath(path)!r}: {error.strerror or error}: is the process "
            "that serves it running?"
        ) from error
    try:
        await connection.opened
    except asyncio.CancelledError:
        connection.abort("connecting was cancelled")
        raise
    if on_disconnect is not None:
        connection.on_close(on_disconnect)
    return connection


class Server:
    """Accepts connections on one socket. Made by `serve`."""

    def __init__(
        self,
        path: Path,
        on_connect: Opened | None,
        on_disconnect: Closed | None,
        on_reject: Rejected | None,
    ) -> None:
        self.path = path
        self.connections: set[Connection] = set()
        """those whose handshake is done"""
        self._greeting: set[Connection] = set()
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._on_reject = on_reject
        self._listener: asyncio.AbstractServer | None = None

    async def listen(self, make: Callable[[], Connection], listener: socket.socket) -> None:
        """Accept connections from now on."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(partial(self._accept, make), sock=listener)

    def _accept(self, make: Callable[[], Connection]) -> Connection:
        connection = make()
        self._greeting.add(connection)
        connection.opened.add_done_callback(partial(self._greeted, connection))
        return connection

    def _greeted(self, connection: Connection, opened: asyncio.Future[None]) -> None:
        self._greeting.discard(connection)
        error = opened.exception()
        if isinstance(error, WireError):
            self._reject(error)
        elif connection.closed:
            self._reject(ConnectionLost(f"{connection.peer} left right after the handshake"))
        else:
            self.connections.add(connection)
            connection.on_close(self._ended)
            if self._on_connect is not None:
                self._on_connect(connection)

    def _reject(self, error: WireError) -> None:
        level = logging.WARNING if isinstance(error, HandshakeFailed) else logging.INFO
        log.log(level, "a connection to %s was not made: %s", self.path, error)
        if self._on_reject is not None:
            self._on_reject(error)

    def _ended(self, connection: Connection, reason: str) -> None:
        self.connections.discard(connection)
        if self._on_disconnect is not None:
            self._on_disconnect(connection, reason)

    async def close(self) -> None:
        """Close every connection and remove the socket."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        every = [*self.connections, *self._greeting]
        for connection in every:
            connection.close("the server was closed")
        await asyncio.gather(*(connection.wait_closed() for connection in every))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


async def serve(
    path: str | os.PathLike[str],
    secret: bytes,
    *,
    router: Router,
    name: str = "server",
    on_connect: Opened | None = None,
    on_disconnect: Closed | None = None,
    on_reject: Rejected | None = None,
    heartbeat_interval: float | None = None,
    heartbeat_limit: float = HEARTBEAT_LIMIT,
    handshake_timeout: float = HANDSHAKE_SECONDS,
) -> Server:
    """Serve a socket that only this user can reach.

    Args:
        path: where the socket is made; its folder is made too, and must be this user's alone.
        on_connect: called with each connection once it has proved the secret.
        on_disconnect: called with it, and the reason, when it is closed or lost.
        on_reject: called when somebody could not prove it (always logged).

    Raises:
        WireError: the path is too long, in use, cannot be made, or others can reach it.
    """
    check_secret(secret)
    check_path(path)
    heartbeat = Heartbeat.of(heartbeat_limit, heartbeat_interval)
    server = Server(Path(path), on_connect, on_disconnect, on_reject)

    def make() -> Connection:
        handshake = Handshake("server", secret, name)
        return Connection(router, handshake, heartbeat, handshake_timeout)

    await server.listen(make, _bind(Path(path)))
    return server


def check_path(path: str | os.PathLike[str]) -> None:
    """Refuse a path that the system would refuse, or cut.

    Raises:
        WireError: it is too long.
    """
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise WireError(
            f"the socket path has {size} bytes, the system allows {MAX_PATH_BYTES}: choose a "
            f"shorter folder than that of {os.fspath(path)!r}"
        )


def _bind(path: Path) -> socket.socket:
    """A listening socket, owner-only in an owner-only folder."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.parent.stat()
    except OSError as error:
        raise WireError(f"cannot make the folder {str(path.parent)!r}: {error.strerror}") from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise WireError(
            f"the folder {str(path.parent)!r} of the socket can be used by others: give it to this "
            "user and make it mode 700"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        path.chmod(0o600)
    except OSError as error:
        listener.close()
        raise WireError(f"cannot make the socket {str(path)!r}: {error.strerror}") from error
    return listener
