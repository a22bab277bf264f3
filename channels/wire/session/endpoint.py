"""Connecting and listening: on a Unix socket between processes of one host, on TCP between hosts.

A server distinguishes three kinds of sockets: those that have not proved the secret, which have
some seconds and one kilobyte to do it; those of new peers; and those on which a connection resumes.

An address is a path, ``tcp://host:port``, or ``tls://host:port`` for TCP under TLS. A path
``@name`` is a name in the abstract namespace of Linux: it has no file and ends with its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypedDict, Unpack
from urllib.parse import urlsplit

from rlinf_async import deadlines
from rlinf_async.channels.errors import ConnectionLost, HandshakeFailed, WireError
from rlinf_async.channels.wire.session.connection import Closed, Connection, Redial, Router
from rlinf_async.channels.wire.session.link import (
    GRACE_SECONDS,
    NEW,
    Handshake,
    HandshakeTimeout,
    Link,
    Terms,
    check_secret,
)
from rlinf_async.channels.wire.session.streams import (
    HEARTBEAT_LIMIT,
    PATIENCE,
    Heartbeat,
    check_patience,
)
from rlinf_async.channels.wire.session.tls import TlsAccept, client_context, server_context

MAX_PATH_BYTES: Final = 107
BACKLOG: Final = 128


class UnixAddress(NamedTuple):
    """A socket in a folder of this host, or a name in its abstract namespace."""

    path: Path

    @property
    def abstract(self) -> bool:
        """Whether the address is a name, and no file: any user of this host can connect."""
        return str(self.path).startswith("@")

    @property
    def name(self) -> str:
        """The address as the system call takes it."""
        return f"\0{str(self.path)[1:]}" if self.abstract else str(self.path)

    def __str__(self) -> str:
        return str(self.path)


class TcpAddress(NamedTuple):
    """A port of a host."""

    host: str
    port: int
    tls: bool = False
    """whether its connections are encrypted"""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse(address: str | os.PathLike[str]) -> Address:
    """The address that this text or path stands for.

    Raises:
        WireError: it is invalid.
    """
    text = os.fspath(address)
    if not text.startswith(("tcp://", "tls://")):
        check_path(address)
        return UnixAddress(Path(address))
    parts = urlsplit(text)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.username or parts.path or parts.query or parts.fragment:
        raise WireError(
            f"{text!r} is not an address: write tcp://host:port, or tls://host:port for an "
            "encrypted connection, with the name or number of one of this host's addresses where "
            "it is to listen (port 0 takes a free one)"
        )
    return TcpAddress(host, port, parts.scheme == "tls")


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


def bind_unix(address: UnixAddress) -> socket.socket:
    """A socket to listen on: a name, or owner-only in an owner-only folder, which is made too.

    Raises:
        WireError: it cannot be made, or its folder can be used by others.
    """
    if not address.abstract:
        make_own_folder(address.path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address.name)
        if not address.abstract:
            address.path.chmod(0o600)
    except OSError as error:
        listener.close()
        raise WireError(f"cannot make the socket {str(address)!r}: {error.strerror}") from error
    return listener


def make_own_folder(path: Path) -> None:
    """Make the folder of this socket, for this user alone.

    Raises:
        WireError: it cannot be made, or can be used by others.
    """
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


def bind_tcp(address: TcpAddress) -> socket.socket:
    """A socket to listen on, at this one address of this host and no other. Looks the name up.

    Raises:
        WireError: the address is not this host's, or in use.
    """
    listener: socket.socket | None = None
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, where = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise WireError(
            f"cannot listen on {address}: {error.strerror or error}: is it an address of this "
            "host, and the port free?"
        ) from error
    return listener


HANDSHAKE_SECONDS: Final = 10.0


class Timeouts(TypedDict, total=False):
    """Time limits, in seconds, each with a default."""

    heartbeat_interval: float | None
    """seconds between heartbeats; by default an eighth of the limit, at most 1"""
    heartbeat_limit: float
    """silence after which the peer counts as lost; 15 by default"""
    handshake_timeout: float
    """time that the other side has to prove the secret; 10 by default"""
    patience: float
    """seconds for which a cut connection may resume, the lower value of both sides; 0: a cut ends
    it. 10 by default"""


class EndpointOptions(NamedTuple):
    """The name, secret, request handlers and time limits of one side of connections."""

    secret: bytes
    name: str
    router: Router
    heartbeat: Heartbeat
    handshake_timeout: float
    patience: float

    @classmethod
    def of(
        cls,
        secret: bytes,
        name: str,
        router: Router,
        *,
        heartbeat_interval: float | None = None,
        heartbeat_limit: float = HEARTBEAT_LIMIT,
        handshake_timeout: float = HANDSHAKE_SECONDS,
        patience: float = PATIENCE,
    ) -> Self:
        """The options with these `Timeouts`.

        Raises:
            ValueError: the secret is too short, or a time limit is invalid.
        """
        check_secret(secret)
        check_patience(patience)
        heartbeat = Heartbeat.of(heartbeat_limit, heartbeat_interval)
        return cls(secret, name, router, heartbeat, handshake_timeout, patience)

    def connection(
        self, peer: str, number: bytes, patience: float, redial: Redial | None = None
    ) -> Connection:
        """A new connection to this peer, with the lower patience of both sides."""
        return Connection(
            self.router,
            self.heartbeat,
            peer=peer,
            number=number,
            patience=lower(self.patience, patience),
            redial=redial,
        )


def lower(ours: float, theirs: float) -> float:
    """The lower patience of both sides; 0 where the other's is invalid."""
    return min(ours, theirs) if theirs > 0 else 0.0


ATTEMPT_BYTES: Final = 16
FIRST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 1.0
"""Seconds between two tries to connect again."""


class NotListening(ConnectionLost):
    """Nothing listens at the address (any more): trying again is of no use."""


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

        def greeted(link: Link) -> Connection:
            terms = link.handshake.terms
            made.append(side.connection(link.peer, terms.number, terms.patience, self._redial))
            return made[0]

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

    def _link(self, terms: Terms, greeted: Callable[[Link], Connection], timeout: float) -> Link:
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


def _as_before(connection: Connection, link: Link) -> Connection:
    return connection


log = logging.getLogger(__name__)

LINES: Final = 5
"""Rejections that are logged one by one,"""
SECONDS: Final = 60.0
"""seconds in which the first few are logged; of the others only the number is"""


class Rejections:
    """The connections that one server did not make, as they are logged: the first few of a while,
    and how many more there were. So whoever can reach the address cannot fill the log."""

    def __init__(self) -> None:
        self._count = 0
        self._address = ""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, address: str, error: WireError) -> None:
        """One more connection to this address was not made."""
        self._address = address
        self._count += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SECONDS, self.count)
        if self._count <= LINES:
            level = logging.WARNING if isinstance(error, HandshakeFailed) else logging.INFO
            log.log(level, "a connection to %s was not made: %s", address, error)

    def count(self) -> None:
        """Say how many were left out; those from now on are logged again."""
        more, self._count = self._count - LINES, 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if more > 0:
            log.warning(
                "%d more connections to %s were not made within %g s: their other sides did not "
                "prove the secret, or left before", more, self._address, SECONDS,
            )  # fmt: skip


NUMBER_BYTES: Final = len(NEW)
CLOSED: Final = "the server was closed"
MAX_PENDING: Final = 128
"""Sockets whose other side has not proved the secret yet, at most; one more evicts another."""

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
        """connections that were made and not lost, also those that are cut and may resume"""
        self._by_number: dict[bytes, Connection] = {}
        self._by_attempt: dict[bytes, Connection] = {}
        self._pending: dict[Link, None] = {}  # they have not proved the secret yet; oldest first
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
        link = Link(handshake, side.handshake_timeout, lambda _: made[0])
        self._make_room()
        self._pending[link] = None
        link.start_timer()
        link.opened.add_done_callback(partial(self._known, link, made))
        return link

    def _make_room(self) -> None:
        """Evict one of too many: the oldest of those that have not sent a valid greeting, or of
        all. It is not refused: an honest client tries again."""
        if len(self._pending) >= MAX_PENDING:
            evicted = min(self._pending, key=lambda link: link.handshake.introduced)
            del self._pending[evicted]
            evicted.evict(f"evicted by {MAX_PENDING} others, before it had proved the secret")

    def _accept_tls(self, context: ssl.SSLContext) -> TlsAccept:
        return TlsAccept(self._accept(), context, self._side.handshake_timeout)

    def _settle(self, made: list[Connection], handshake: Handshake) -> Terms:
        """The connection of this peer: a new one, or the one that it resumes."""
        asked = handshake.terms
        begun = self._by_attempt.get(asked.attempt) if asked.number == NEW else None
        if begun is not None and begun.peer == handshake.peer and not begun.received_bytes:
            connection, number = begun, begun.number  # the answer to its last try did not arrive
            connection.drop_link()
        elif asked.number == NEW:
            number = os.urandom(NUMBER_BYTES)
            connection = self._side.connection(handshake.peer, number, asked.patience)
        else:
            number = asked.number
            found = self._by_number.get(number)
            if found is None or found.peer != handshake.peer:
                raise handshake.refuse("this process does not know its connection (any more)")
            connection = found
            connection.drop_link()
        made.append(connection)
        return Terms(number, connection.received_bytes, self._side.patience)

    def _known(self, link: Link, made: list[Connection], opened: asyncio.Future[None]) -> None:
        self._pending.pop(link, None)
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
    """Bind a socket in a thread, since looking up a name takes its time. Where this is cancelled,
    the thread goes on, and what it has made is closed."""
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
