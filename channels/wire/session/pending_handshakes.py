"""Who is at the door and has not proved anything yet: at most so many, and nobody is kept out.

One more than that makes somebody else leave:

1. of those who come from where most of them come from: an address of IPv4, a network of IPv6 (the
   first 64 bits), or a process, on a Unix socket. So who floods the door makes room for himself;
2. of these, who has not even said which protocol he speaks;
3. of these, who has been there longest.

Who has to leave is not refused: an honest one tries again.
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
    """The sockets whose other side has not proved anything yet."""

    def __init__(self) -> None:
        self._origins: dict[Link, str | None] = {}

    def __iter__(self) -> Iterator[Link]:
        return iter(tuple(self._origins))

    def __len__(self) -> int:
        return len(self._origins)

    def add(self, link: Link) -> None:
        """Somebody will be there."""
        self._origins[link] = None

    def remove(self, link: Link) -> None:
        """He is known now, or gone."""
        self._origins.pop(link, None)

    def arrived(self, link: Link) -> None:
        """Somebody is there: if there are too many, another one leaves."""
        if link not in self._origins or link.transport is None:
            return
        before = {one: origin for one, origin in self._origins.items() if origin is not None}
        self._origins[link] = origin_of(link.transport)
        if len(before) < MAX_PENDING:
            return
        crowds = Counter(before.values())
        leaves = min(before, key=lambda one: (-crowds[before[one]], one.handshake.introduced))
        self.remove(leaves)
        leaves.evict(f"{MAX_PENDING} others came, and it has not proved anything: turned out")


def origin_of(transport: asyncio.BaseTransport) -> str:
    """Where this socket comes from, as far as one who floods the door cannot choose it."""
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
