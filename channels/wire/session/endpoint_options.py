"""What a process is on every connection that it makes or accepts."""

from __future__ import annotations

from typing import Final, NamedTuple, Self, TypedDict

from rlinf_async.channels.wire.session.auth import check_secret
from rlinf_async.channels.wire.session.connection import Connection, Redial
from rlinf_async.channels.wire.session.heartbeat import HEARTBEAT_LIMIT, Heartbeat
from rlinf_async.channels.wire.session.reconnect import PATIENCE, check_patience
from rlinf_async.channels.wire.session.router import Router

HANDSHAKE_SECONDS: Final = 10.0


class Timeouts(TypedDict, total=False):
    """How long things may take, in seconds; each of them may be left out."""

    heartbeat_interval: float | None
    """between signs of life; by default as the limit needs it"""
    heartbeat_limit: float
    """without a sign of life, after which the peer is given up; 15 by default"""
    handshake_timeout: float
    """that a stranger, or whoever answers here, has to prove the secret; 10 by default"""
    patience: float
    """for which a connection is kept when it is cut, while it is taken up again; what the peer says
    counts too, if it is less. 0: a cut ends it. 10 by default"""


class EndpointOptions(NamedTuple):
    """One side of connections: who it is, what it answers, and how long it waits."""

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
        """The side with these `Timeouts`.

        Raises:
            ValueError: the secret is none, or a time makes no sense.
        """
        check_secret(secret)
        check_patience(patience)
        heartbeat = Heartbeat.of(heartbeat_limit, heartbeat_interval)
        return cls(secret, name, router, heartbeat, handshake_timeout, patience)

    def connection(
        self, peer: str, number: bytes, patience: float, redial: Redial | None = None
    ) -> Connection:
        """A new connection to this peer, which has so much patience."""
        return Connection(
            self.router,
            self.heartbeat,
            peer=peer,
            number=number,
            patience=lower(self.patience, patience),
            redial=redial,
        )


def lower(ours: float, theirs: float) -> float:
    """The patience of both sides, whatever the other says."""
    return min(ours, theirs) if theirs > 0 else 0.0
