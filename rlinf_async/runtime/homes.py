"""Channels whose queue lives with a worker: see `Cluster.channel_at`.

::

    driver   HomedChannel ----- ends of each call ---> worker   CallEnds --- puts, gets ---.
               |                                                                           v
               +--- makes, watches ------------------> worker   WorkerHome: queues that live here
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from rlinf_async.channels import Channel, Key, KeyState, Receiver, Sender, Statistics
from rlinf_async.channels.wire import (
    ChannelClient,
    Connection,
    Direct,
    EndRef,
    Router,
    Server,
    serve,
)
from rlinf_async.channels.wire.adopting import AdoptedEnd, Homes
from rlinf_async.channels.wire.direct import host_id
from rlinf_async.channels.wire.homes import HomedQueues, RemoteChannel
from rlinf_async.channels.wire.protocol import Home
from rlinf_async.channels.wire.session.endpoint import TcpAddress, parse

T = TypeVar("T")


class HomedChannel(Generic[T]):
    """A channel whose queue lives with a worker. Made by `Cluster.channel_at`.

    It is used as a `Channel` is.
    """

    def __init__(self, inner: Channel[T] | RemoteChannel[T], home: str) -> None:
        self._inner = inner
        self.home = home
        """name of the worker: ``"Actor[0]"``"""

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def item_type(self) -> Any:
        return self._inner.item_type

    @property
    def sender(self) -> Sender[T]:
        """The channel's own sender, open from its first use."""
        return self._inner.sender

    @property
    def receiver(self) -> Receiver[T]:
        """The channel's own receiver, open from its first use."""
        return self._inner.receiver

    async def statistics(self) -> Statistics:
        """Return what the channel has seen so far. Raises `HomeLost`."""
        return await self._inner.statistics()

    async def state(self, *, key: Key | None = None) -> KeyState:
        """How full this key is now: depth, room, weight. Raises `HomeLost`."""
        return await self._inner.state(key=key)

    def close(self) -> None:
        """End the channel: nothing can be put any more; what is queued can still be taken."""
        self._inner.close()

    def fail(self, error: BaseException | str) -> None:
        """End the channel with an error: every waiting and later use of any end raises it."""
        self._inner.fail(error)

    def __repr__(self) -> str:
        return f"<HomedChannel {self.name!r} with {self.home}>"


class WorkerHome:
    """The queues that live with a worker, and where others reach them. Listens from the first one
    on."""

    def __init__(
        self, name: str, secret: bytes, outside: str | None, heartbeat_limit: float
    ) -> None:
        self._name = name
        self._secret = secret
        self._outside = outside
        self._heartbeat_limit = heartbeat_limit
        self._servers: list[Server] = []
        self._opening: asyncio.Lock = asyncio.Lock()
        self.found: tuple[Home, HomedQueues] | None = None
        """once it listens"""

    async def listen(self, owner: Connection) -> Home:
        """Listen, and return the home as others reach it. Raises `WireError` where it cannot."""
        async with self._opening:
            if self.found is None:
                self.found = await self._open(owner)
            return self.found[0]

    async def close(self) -> None:
        """Close every connection."""
        for server in self._servers:
            await server.close()

    async def _open(self, owner: Connection) -> tuple[Home, HomedQueues]:
        router = Router()
        queues = HomedQueues(router)
        for address in self._addresses(owner):
            server = await serve(
                address,
                self._secret,
                router=router,
                name=self._name,
                heartbeat_limit=self._heartbeat_limit,
            )
            self._servers.append(server)
        addresses = tuple(str(server.address) for server in self._servers)
        return Home(self._name, host_id(), addresses), queues

    def _addresses(self, owner: Connection) -> list[str]:
        """Return the addresses to listen at: a Unix socket for this host; where others may ask,
        also the interface through which the cluster's owner is reached, or that the owner listens
        at where it is on this host."""
        found = [f"@rlinf-{secrets.token_hex(16)}"]
        if self._outside is not None:
            known = parse(self._outside)
            assert isinstance(known, TcpAddress)
            host = known.host if owner.local else owner.local_host or known.host
            found.append(str(TcpAddress(host, 0, known.tls)))
        return found


class CallEnds:
    """The ends among the arguments of one call, in the worker that runs it."""

    def __init__(self, owner: Connection, direct: Direct | None) -> None:
        self._owner = ChannelClient(owner, direct)
        self._direct = direct
        self._adopted: dict[tuple[Home | None, int], AdoptedEnd] = {}

    async def adopt(self, refs: Sequence[EndRef], homes: Homes) -> None:
        """Take over the ends whose queues live with workers.

        Raises:
            ChannelError: a home is gone, or cannot be reached; an end was closed meanwhile.
        """
        found = await asyncio.gather(*(homes.adopt(ref, self._direct) for ref in refs))
        self._adopted = {(ref.home, ref.number): one for ref, one in zip(refs, found, strict=True)}

    def end(self, ref: EndRef, item_type: Any) -> Any:
        """The end that this stands for."""
        if ref.home is None:
            return self._owner.end(ref, item_type)
        return self._adopted[ref.home, ref.number].make(item_type)

    @property
    def has_senders(self) -> bool:
        """Whether there may be anything to `flush`."""
        return any(client.has_senders for client in self._clients())

    @property
    def has_homes(self) -> bool:
        """Whether some queues live with workers."""
        return bool(self._adopted)

    async def flush(self) -> None:
        """Return once all that was put is in its place. Raises what became of the first item."""
        for client in self._clients():
            await client.flush()

    def _clients(self) -> list[ChannelClient]:
        adopted = [one.client for one in self._adopted.values()]
        return [self._owner, *(client for client in adopted if client is not None)]
