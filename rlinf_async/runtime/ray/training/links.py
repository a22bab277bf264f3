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


class HostTicket(msgspec.Struct, frozen=True):
    """Where channels of another process are served. It holds a secret: it goes through Ray's calls,
    and nowhere else."""

    address: str
    secret: bytes


class Ticket(msgspec.Struct, frozen=True):
    """The end of a channel on its way to another process."""

    host: HostTicket
    end: EndRef


class ChannelHost:
    """Serves channels of this process. Made by `open`.

    Args:
        router: what else the processes that come here may ask.
    """

    def __init__(
        self, server: Server, channels: ChannelServer, router: Router, secret: bytes
    ) -> None:
        self._server, self._secret = server, secret
        self.channels, self.router = channels, router

    @classmethod
    async def open(cls, address: str, name: str) -> Self:
        """Listen at a free port of this host's address."""
        router, secret = Router(), secrets.token_bytes(32)
        channels = ChannelServer(router)
        shown = f"[{address}]" if ":" in address else address
        server = await serve(f"tcp://{shown}:0", secret, router=router, name=name)
        return cls(server, channels, router, secret)

    @property
    def host_ticket(self) -> HostTicket:
        """How others come here."""
        return HostTicket(self._server.address, self._secret)

    def ticket(self, end: Local, holder: str) -> Ticket:
        """Open an end like this one for another process, ``holder`` in reports."""
        return Ticket(self.host_ticket, self.channels.end_ref(end, holder))

    async def close(self) -> None:
        """Serve nobody any more."""
        await self._server.close()


class Guest:
    """Makes ends of tickets, over one connection to each host."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._connections: dict[str, Connection] = {}
        """by address"""

    async def end(self, ticket: Ticket, item_type: Any) -> Any:
        """Return the end that a ticket stands for. Raises `WireError`: its host is not there."""
        return ChannelClient(await self.connection(ticket.host)).end(ticket.end, item_type)

    async def connection(self, host: HostTicket) -> Connection:
        """Return the connection to a host. Raises `WireError`: it is not there."""
        found = self._connections.get(host.address)
        if found is None or found.closed:
            name = f"{self._name} ({os.getpid()})"
            found = await connect(host.address, host.secret, name=name, router=Router())
            self._connections[host.address] = found
        return found

    async def close(self) -> None:
        """Leave all hosts."""
        for connection in self._connections.values():
            connection.close()
            await connection.wait_closed()
        self._connections.clear()
