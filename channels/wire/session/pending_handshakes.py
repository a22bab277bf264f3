"""Sockets whose other side has not proved the secret yet: at most `MAX_PENDING`.

One more evicts another:

1. one of the origin that has the most: an IPv4 address, an IPv6 network (the first 64 bits), or a
   process at the other end of a Unix socket. So a flood evicts its own sockets;
2. of these, one that has not sent a valid greeting;
3. of these, the oldest.

An evicted client is not refused: an honest one tries again.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterator
from typing import Final

from rlinf_async.channels.wire.session.peer_process import is_local, peer_pid
from rlinf_async.channels.wire.session.socket_link import Link

MAX_PENDING: Final = 128


class PendingHandshakes:
    """The sockets whose other side has not proved the secret yet."""

    def __init__(self) -> None:
        self._origins: dict[Link, str | None] = {}

    def __iter__(self) -> Iterator[Link]:
        return iter(tuple(self._origins))

    def __len__(self) -> int:
        return len(self._origins)

    def add(self, link: Link) -> None:
        """This socket is being accepted."""
        self._origins[link] = None

    def remove(self, link: Link) -> None:
        """Its other side is known now, or gone."""
        self._origins.pop(link, None)

    def arrived(self, link: Link, transport: asyncio.BaseTransport) -> None:
        """It is connected by this: if there are too many, evict another one."""
        if link not in self._origins:
            return
        before = {one: origin for one, origin in self._origins.items() if origin is not None}
        self._origins[link] = origin_of(transport)
        if len(before) < MAX_PENDING:
            return
        counts = Counter(before.values())
        evicted = min(before, key=lambda one: (-counts[before[one]], one.handshake.introduced))
        self.remove(evicted)
        evicted.evict(f"evicted by {MAX_PENDING} others, before it had proved the secret")


def origin_of(transport: asyncio.BaseTransport) -> str:
    """Where this socket comes from, as far as an attacker cannot choose it."""
    if is_local(transport):
        return f"process {peer_pid(transport)}"
    peer = transport.get_extra_info("peername")
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except (TypeError, IndexError, ValueError):  # it has left already
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
