"""Options of every connection that a process makes or accepts."""

from __future__ import annotations

from typing import Final, NamedTuple, Self, TypedDict

from rlinf_async.channels.wire.session.answers import Router
from rlinf_async.channels.wire.session.auth import check_secret
from rlinf_async.channels.wire.session.connection import Connection, Redial
from rlinf_async.channels.wire.session.heartbeat import HEARTBEAT_LIMIT, Heartbeat
from rlinf_async.channels.wire.session.reconnect import PATIENCE, check_patience

HANDSHAKE_SECONDS: Final = 10.0


class Timeouts(TypedDict, total=False):
    """Time limits, in seconds, each with a default."""

    heartbeat_interval: float | None
    """between heartbeats; by default an eighth of the limit, at most 1"""
    heartbeat_limit: float
    """silence after which the peer counts as lost; 15 by default"""
    handshake_timeout: float
    """time that the other side has to prove the secret; 10 by default"""
    patience: float
    """for which a cut connection may resume, the lower value of both sides; 0: a cut ends it. 10 by
    default"""


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
            self.router.answering,
            self.heartbeat,
            peer=peer,
            number=number,
            patience=lower(self.patience, patience),
            redial=redial,
        )


def lower(ours: float, theirs: float) -> float:
    """The lower patience of both sides; 0 where the other's is invalid."""
    return min(ours, theirs) if theirs > 0 else 0.0
