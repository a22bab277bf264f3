"""Channels of one actor of Ray that another uses: over our connections, not through Ray."""

from __future__ import annotations

import os
import secrets
from typing import Any, Self

import msgspec

from rlinf_async.channels.wire import (
    ChannelClient,
    ChannelServer,
    Connection,
    EndRef,
    Router,
    Server,
    connect,
    serve,
)
from rlinf_async.channels.wire.links.published import Local


class Ticket(msgspec.Struct, frozen=True):
    """The end of a channel on its way to another process. It holds a secret: it goes through Ray's
    calls, and nowhere else."""

    address: str
    secret: bytes
    end: EndRef


class ChannelHost:
    """Serves channels of this process. Made by `open`."""

    def __init__(self, server: Server, channels: ChannelServer, secret: bytes) -> None:
        self._server, self._channels, self._secret = server, channels, secret

    @classmethod
    async def open(cls, address: str, name: str) -> Self:
        """Listen at a free port of this host's address."""
        router, secret = Router(), secrets.token_bytes(32)
        channels = ChannelServer(router)
        shown = f"[{address}]" if ":" in address else address
        server = await serve(f"tcp://{shown}:0", secret, router=router, name=name)
        return cls(server, channels, secret)

    def ticket(self, end: Local, holder: str) -> Ticket:
        """Open an end like this one for another process, ``holder`` in reports."""
        return Ticket(self._server.address, self._secret, self._channels.end_ref(end, holder))


class Guest:
    """Makes ends of tickets, over one connection to each host."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._clients: dict[str, tuple[Connection, ChannelClient]] = {}

    async def end(self, ticket: Ticket, item_type: Any) -> Any:
        """Return the end that a ticket stands for. Raises `WireError`: its host is not there."""
        found = self._clients.get(ticket.address)
        if found is None or found[0].closed:
            name = f"{self._name} ({os.getpid()})"
            connection = await connect(ticket.address, ticket.secret, name=name, router=Router())
            found = self._clients[ticket.address] = connection, ChannelClient(connection)
        return found[1].end(ticket.end, item_type)
