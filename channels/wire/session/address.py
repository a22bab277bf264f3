"""Where a process can be reached: a Unix socket on one host, TCP between hosts.

An address is a path, ``tcp://host:port``, or ``tls://host:port`` for TCP under TLS. A path
``@name`` is a name in the abstract namespace of Linux: it has no file and ends with its process.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from rlinf_async.channels.errors import WireError

MAX_PATH_BYTES: Final = 107
BACKLOG: Final = 128


class UnixAddress(NamedTuple):
    """A socket in a folder of this host, or a name in its abstract namespace."""

    path: Path

    @property
    def abstract(self) -> bool:
        """Whether it is a name, and no file: any user of this host can connect."""
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
