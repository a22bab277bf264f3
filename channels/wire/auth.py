"""Who may speak: both sides prove that they know the cluster's secret. Pure: no socket, no clock.

::

    client                                            server
      HELLO  magic, version, nonce, name  ------------->
      <-------------  magic, version, nonce, name  HELLO
      PROOF  HMAC(secret, "client", both hellos)  ----->      wrong: REFUSED with the reason
      <-----  HMAC(secret, "server", both hellos)  PROOF

Nothing else is read before. Each message is a byte of type, two of length, and at most
`MAX_MESSAGE` bytes. The secret itself never travels; the nonces make every proof good for one
connection, the two labels keep a proof from being sent back to its maker, and the proofs cover
version and names.
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import Final, Literal

from rlinf_async.channels.errors import HandshakeFailed
from rlinf_async.channels.wire.framing import PROTOCOL_VERSION

MAGIC: Final = b"rlinf-async"
NONCE_BYTES: Final = 32
MIN_SECRET_BYTES: Final = 16
MAX_NAME_BYTES: Final = 256
MAX_MESSAGE: Final = 1024
PREFIX: Final = struct.Struct("<BH")
VERSION: Final = struct.Struct("<H")

HELLO, PROOF, REFUSED = 1, 2, 3


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
    """One side of the exchange. Feed it what arrives, send what `take_outgoing` gives."""

    def __init__(
        self,
        role: Literal["client", "server"],
        secret: bytes,
        name: str,
        version: int | None = None,
    ) -> None:
        check_secret(secret)
        self.role = role
        self.peer = ""
        """the other side's name, known to be true once `done`"""
        self.done = False
        self.rest = b""
        """what arrived behind the handshake"""
        self._secret = secret
        self._version = PROTOCOL_VERSION if version is None else version
        encoded = name.encode()[:MAX_NAME_BYTES]
        self._hello = MAGIC + VERSION.pack(self._version) + os.urandom(NONCE_BYTES) + encoded
        self._peer_hello = b""
        self._received = b""
        self._outgoing = _pack(HELLO, self._hello) if role == "client" else b""

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
                raise self._refuse("it does not speak this protocol")
            stop = PREFIX.size + length
            if len(self._received) < stop:
                break
            payload, self._received = self._received[PREFIX.size : stop], self._received[stop:]
            self._handle(kind, payload)
        if self.done:
            self.rest, self._received = self._received, b""

    def _handle(self, kind: int, payload: bytes) -> None:
        if kind == REFUSED:
            raise HandshakeFailed(f"the {self._other} refused: {payload.decode(errors='replace')}")
        if kind == HELLO and not self._peer_hello:
            self._handle_hello(payload)
        elif kind == PROOF and self._peer_hello:
            self._handle_proof(payload)
        else:
            raise self._refuse("it does not follow the handshake")

    def _handle_hello(self, payload: bytes) -> None:
        if not payload.startswith(MAGIC) or len(payload) < len(MAGIC) + VERSION.size + NONCE_BYTES:
            raise self._refuse("it does not speak this protocol")
        (version,) = VERSION.unpack_from(payload, len(MAGIC))
        if version != self._version:
            raise self._refuse(
                f"protocol versions differ: the {self._other} speaks {version}, the {self.role} "
                f"{self._version}; run the same rlinf_async on both sides"
            )
        self._peer_hello = payload
        name = payload[len(MAGIC) + VERSION.size + NONCE_BYTES :]
        self.peer = name.decode(errors="replace")
        self._outgoing += (
            _pack(PROOF, self._proof(self.role))
            if self.role == "client"
            else _pack(HELLO, self._hello)
        )

    def _handle_proof(self, payload: bytes) -> None:
        if not hmac.compare_digest(payload, self._proof(self._other)):
            raise self._refuse("the cluster's secret is wrong")
        if self.role == "server":
            self._outgoing += _pack(PROOF, self._proof("server"))
        self.done = True

    def _proof(self, role: str) -> bytes:
        hellos = (self._hello, self._peer_hello)
        client, server = hellos if self.role == "client" else reversed(hellos)
        sized = (struct.pack("<I", len(part)) + part for part in (role.encode(), client, server))
        return hmac.digest(self._secret, b"".join(sized), "sha256")

    @property
    def _other(self) -> str:
        return "server" if self.role == "client" else "client"

    def _refuse(self, reason: str) -> HandshakeFailed:
        self._outgoing += _pack(REFUSED, reason.encode()[:MAX_MESSAGE])
        who = f" ({self.peer!r})" if self.peer else ""
        return HandshakeFailed(f"the {self._other}{who} was refused: {reason}")


def _pack(kind: int, payload: bytes) -> bytes:
    return PREFIX.pack(kind, len(payload)) + payload
