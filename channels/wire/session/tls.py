"""TLS between hosts. The certificate follows from the cluster's secret.

Both sides derive the same Ed25519 key from the secret, and from it, byte for byte, the same
self-signed certificate: Ed25519 signatures are deterministic. Each side presents it and trusts it
alone, so nothing but the secret has to travel, and whoever lacks it does not get past the handshake
of TLS. Sessions use TLS 1.3, whose keys are ephemeral: with the secret alone, what was recorded
earlier cannot be decrypted.

Processes of several hosts are given the secret by their environment, or better by a file of their
user's own, and never by a command line, which everybody on a host can read.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import hmac
import importlib
import os
import socket
import ssl
import stat
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, Final, cast

from rlinf_async.channels.errors import WireError
from rlinf_async.channels.wire.session.link import Link, check_secret

LABEL: Final = b"rlinf_async: key of the cluster's certificate"
NAME: Final = "rlinf-async-cluster"
FROM, UNTIL = datetime.datetime(2020, 1, 1), datetime.datetime(2120, 1, 1)
"""fixed, as all of the certificate is: a clock that is off by minutes ends no connection"""


@functools.lru_cache(maxsize=8)
def server_context(secret: bytes) -> ssl.SSLContext:
    """The context of the side that listens.

    Raises:
        WireError: `cryptography`, which makes the certificate, is not installed.
    """
    return _context(ssl.PROTOCOL_TLS_SERVER, secret)


@functools.lru_cache(maxsize=8)
def client_context(secret: bytes) -> ssl.SSLContext:
    """The context of the side that connects.

    Raises:
        WireError: as `server_context`.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, secret)


def _context(protocol: Any, secret: bytes) -> ssl.SSLContext:
    key, certificate = make_certificate(secret)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # hosts have many names; the certificate is the cluster's
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    _load(context, key + certificate)
    return context


def make_certificate(secret: bytes) -> tuple[bytes, bytes]:
    """Private key and certificate of the cluster with this secret, as PEM.

    Raises:
        WireError: as `server_context`.
    """
    try:
        x509: Any = importlib.import_module("cryptography.x509")
        ed25519: Any = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
        serialization: Any = importlib.import_module("cryptography.hazmat.primitives.serialization")
    except ImportError as error:
        raise WireError(
            f"TLS needs the package cryptography ({error}): pip install 'rlinf_async[tls]' on "
            "every host"
        ) from error
    key = ed25519.Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, LABEL, "sha256"))
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(FROM)
        .not_valid_after(UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(pem)


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Load key and certificate, which `ssl` reads from a file: on Linux one in memory, elsewhere
    one that only this user can read, for this moment."""
    if sys.platform != "linux":
        with tempfile.NamedTemporaryFile() as stored:
            stored.write(pem)
            stored.flush()
            context.load_cert_chain(stored.name)
        return
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(file, pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)


VARIABLE: Final = "RLINF_ASYNC_SECRET"
FILE_VARIABLE: Final = "RLINF_ASYNC_SECRET_FILE"
MAX_SECRET_BYTES: Final = 4096
HOW: Final = (
    "make one with: (umask 077; head -c 32 /dev/urandom | base64 > secret), and give every process "
    f"its path in {FILE_VARIABLE}"
)


def load_secret(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret that the environment gives, or names a file of; None if it does neither.

    Raises:
        ValueError: it gives both, or the secret is too short; see `read_secret`.
        OSError: the file cannot be read.
    """
    text, path = environ.get(VARIABLE), environ.get(FILE_VARIABLE)
    if text is not None and path is not None:
        raise ValueError(f"both {VARIABLE} and {FILE_VARIABLE} are set: unset one of them")
    if path is not None:
        return read_secret(path)
    if text is None:
        return None
    secret = text.strip().encode()
    check_secret(secret)
    return secret


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """The secret in a file that only this user can read; white space around it does not count.

    Raises:
        ValueError: others can read or change the file, it is no file, or what it holds is too short
            or too long.
        OSError: it cannot be read.
    """
    where = os.fspath(path)
    file = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"the cluster's secret {where!r} is not a file: {HOW}")
        if found.st_uid != os.geteuid():
            raise ValueError(
                f"the cluster's secret {where!r} belongs to user {found.st_uid}, not to this one "
                f"({os.geteuid()}): {HOW}"
            )
        if mode := stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError(
                f"the cluster's secret {where!r} can be used by others (mode "
                f"{stat.S_IMODE(found.st_mode):o}, of which {mode:o} is too much): chmod 600 it, "
                "and make a new one if somebody may have read it"
            )
        secret = os.read(file, MAX_SECRET_BYTES + 1).strip()
    finally:
        os.close(file)
    if len(secret) > MAX_SECRET_BYTES:
        raise ValueError(f"the cluster's secret {where!r} has more than {MAX_SECRET_BYTES} bytes")
    try:
        check_secret(secret)
    except ValueError as error:
        raise ValueError(f"{where!r}: {error}") from error
    return secret


class TlsAccept(asyncio.Protocol):
    """Answers the handshake of TLS; then the socket is its link's.

    The loop's own servers with TLS say nothing of a socket before its handshake is over, so that
    nobody could close one of too many. Here the plain socket is known first.

    Args:
        link: what the socket is accepted for.
        seconds: time limit of that handshake.
    """

    def __init__(self, link: Link, context: ssl.SSLContext, seconds: float) -> None:
        self._link = link
        self._context = context
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The plain transport has read nothing yet, and shall not: the first bytes are TLS's.
        plain: socket.socket = transport.get_extra_info("socket").dup()
        plain.setblocking(False)
        self._link.accepted(plain)
        cast("asyncio.Transport", transport).abort()  # uvloop's are not of that class
        self._task = asyncio.get_running_loop().create_task(self._begin(plain))

    async def _begin(self, plain: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._link, plain, ssl=self._context, ssl_handshake_timeout=self._seconds
            )
        except OSError as error:  # ssl.SSLError and TimeoutError are, too
            with contextlib.suppress(OSError):
                plain.close()
            self._link.connection_lost(error)
