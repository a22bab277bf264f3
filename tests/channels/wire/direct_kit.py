"""An owner, producers and consumers over TCP, in one loop, whose large arrays go past the owner."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.channels import Channel, Receiver, Sender
from rlinf_async.channels.wire import ChannelClient, Connection, Direct
from tests.channels.wire.harness import SECRET, Wired, wired

LEAST = 20_000
ELEMENTS = 3_000
FETCH = b"\x0dpayload.fetch"
T = TypeVar("T")


class Item(msgspec.Struct):
    """An item whose elements all say its number."""

    number: int
    values: NDArray[np.int64]

    def check(self) -> int:
        """Its number, if its elements are those that its producer wrote."""
        assert len(self.values) == ELEMENTS
        assert (self.values == self.number).all()
        return self.number


def item(number: int) -> Item:
    """One whose array is large enough."""
    return Item(number, np.full(ELEMENTS, number, np.int64))


def items(capacity: int = 8, **options: Any) -> Channel[Item]:
    """A channel of them."""
    return Channel(Item, name="items", capacity=capacity, **options)


class Party(NamedTuple):
    """A process, as the owner and its peers see it."""

    owner: Wired
    connection: Connection
    direct: Direct | None

    def sender(self, channel: Channel[T]) -> Sender[T]:
        """An end of its own."""
        made: Sender[T] = self._end(channel.sender, channel)
        return made

    def receiver(self, channel: Channel[T]) -> Receiver[T]:
        """An end of its own."""
        made: Receiver[T] = self._end(channel.receiver, channel)
        return made

    def _end(self, end: Any, channel: Channel[T]) -> Any:
        ref = self.owner.channels.end_ref(end, self.connection.peer)
        return ChannelClient(self.connection, self.direct).end(ref, channel.item_type)

    @property
    def kept(self) -> int:
        """Bytes of arrays that stay with it."""
        assert self.direct is not None
        return self.direct.retained_bytes

    @property
    def got(self) -> tuple[int, int]:
        """How many items it fetched itself, and got through the owner."""
        assert self.direct is not None
        return self.direct.fetched, self.direct.passed

    async def leave(self) -> None:
        """Its program ends."""
        self.connection.close()
        await self.connection.wait_closed()
        if self.direct is not None:
            await self.direct.close()

    async def die(self) -> None:
        """Nothing is said or answered by it any more."""
        self.connection.abort("it died")
        if self.direct is not None:
            for server in self.direct._servers:
                for one in list(server.connections):
                    one.abort("it died")
            await self.direct.close()


class World:
    """The owner, and whoever joins."""

    def __init__(self, owner: Wired, stack: AsyncExitStack) -> None:
        self.owner = owner
        self._stack = stack

    async def producer(self, name: str = "producer", **options: Any) -> Party:
        """A process that keeps what it puts."""
        settings: dict[str, Any] = {"listen": ["tcp://127.0.0.1:0"], "least": LEAST} | options
        direct = await Direct.open(SECRET, name=name, **settings)
        return await self._join(name, direct)

    async def consumer(self, name: str = "consumer", **options: Any) -> Party:
        """A process that fetches from others."""
        return await self._join(name, await Direct.open(SECRET, name=name, **options))

    async def plain(self, name: str = "plain") -> Party:
        """A process that knows nothing of all this."""
        return await self._join(name, None)

    async def _join(self, name: str, direct: Direct | None) -> Party:
        made = Party(self.owner, await self.owner.join(name), direct)
        self._stack.push_async_callback(made.leave)
        return made

    def passed(self) -> int:
        """Bytes that the owner got and gave payload."""
        return sum(one.received_bytes + one.sent_bytes for one in self.owner.server.connections)


@asynccontextmanager
async def world(**options: Any) -> AsyncIterator[World]:
    """An owner over TCP."""
    async with (
        wired(address="tcp://127.0.0.1:0", **options) as owner,
        AsyncExitStack() as stack,
    ):
        yield World(owner, stack)


@contextmanager
def holding_fetches(party: Party) -> Iterator[list[Any]]:
    """Let nobody have anything of it meanwhile; who came for it."""
    assert party.direct is not None
    held: list[Any] = []
    routers = [
        party.connection.peer_requests.own,
        *(one._side.router for one in party.direct._servers),
    ]
    before = [router.routes[FETCH] for router in routers]
    for router in routers:
        router.routes[FETCH] = router.routes[FETCH]._replace(answer=held.append)
    yield held
    for router, route in zip(routers, before, strict=True):
        router.routes[FETCH] = route
