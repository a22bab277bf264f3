"""What went over one connection, between two processes."""

from __future__ import annotations

import msgspec

from rlinf_async.channels.wire.session.connection import Connection


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """One connection's counts since it was made. Large arrays are counted in messages."""

    peer: str
    sent_bytes: int
    """through the socket: what lies in shared memory is not sent"""
    received_bytes: int
    sent_shared: int
    """messages whose large arrays went by shared memory, without a copy in the socket"""
    sent_copied: int
    """messages whose large arrays went through the socket"""
    received_shared: int
    received_copied: int
    unsent: int
    """messages that wait because the peer does not read"""
    cuts: int
    """how often its socket was lost and replaced"""
    reconnecting: bool


def traffic_of(connection: Connection) -> Traffic:
    """The counts up to now."""
    memory = connection.memory
    return Traffic(
        peer=connection.peer,
        sent_bytes=connection.sent_bytes,
        received_bytes=connection.received_bytes,
        sent_shared=memory.sent_shared,
        sent_copied=memory.sent_copied,
        received_shared=memory.received_shared,
        received_copied=memory.received_copied,
        unsent=connection.unsent,
        cuts=connection.reconnection.cuts,
        reconnecting=connection.reconnecting,
    )
