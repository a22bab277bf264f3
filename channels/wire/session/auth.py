"""Who may speak: both sides prove that they know the cluster's secret. Pure: no socket, no clock.

::

    client                                            server
      HELLO  magic, version, nonce, terms, name  ------>
      <------  magic, version, nonce, terms, name  HELLO
      PROOF  HMAC(secret, "client", both hellos)  ----->      wrong: REFUSED with the reason
      <-  HMAC(secret, "server", both hellos, terms), terms  PROOF

Nothing else is read before. Each message is a byte of type, two of length, and at most
`MAX_MESSAGE` bytes. The secret itself never travels; the nonces make every proof good for one
socket, the two labels keep a proof from being sent back to its maker, and the proofs cover version,
names and `Terms`: whether this is a new connection, or one that goes on after a cut.

The server gives its terms last, when it knows who asks: an unauthenticated client cannot disturb a
connection.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from rlinf_async.channels.errors import HandshakeFailed
from rlinf_async.channels.wire.frames.framing import PROTOCOL_VERSION

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
    """of the connection, 16 random bytes that the server chose"""
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
    """One side of the exchange. Feed it what arrives, send what `take_outgoing` gives.

    Args:
        terms: the client's: what it asks for.
        settle: the server's: what it answers.
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
