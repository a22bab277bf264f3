"""Both sides of a real socket in one event loop."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from rlinf_async.channels import Channel, Latest, LatestReceiver, LatestSender, Receiver, Sender
from rlinf_async.channels.wire import (
    ChannelClient,
    ChannelServer,
    Connection,
    Router,
    Server,
    connect,
    serve,
)
from rlinf_async.testing import wait_all_blocked

T = TypeVar("T")

SECRET = b"a secret for tests, 32 bytes long"


PATIENCE = 100.0
"""seconds, for what another process does on a busy machine"""


def anything_fits(_: object) -> bool:
    """Stands for the look that an end takes at what is put: of an end that does not look."""
    return True


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until something holds.

    What this process does itself takes turns only. Another process takes time too, and the core on
    which this one would turn.
    """
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    try:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110  (what is looked at sets no event)
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError("it never held") from None


class Turns:
    """Counts the turns of this loop until it is stopped."""

    def __init__(self) -> None:
        self._count = -1
        self._turn()

    def _turn(self) -> None:
        self._count += 1
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    def stop(self) -> int:
        self._handle.cancel()
        return self._count


_owners: list[Wired] = []
"""those that are there now"""


class Wired:
    """An owner of channels, and the processes (all in this loop) that are connected to it."""

    def __init__(self, channels: ChannelServer, server: Server) -> None:
        self.channels = channels
        self.server = server
        self._joined: dict[bytes, Connection] = {}
        self.lost: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        """names of the peers that were lost, and why, in order"""

    @property
    def path(self) -> Path:
        return self.server.path

    async def join(self, name: str = "worker", **options: Any) -> Connection:
        """One more process."""
        connection = await connect(
            self.server.address, SECRET, name=name, router=Router(), **options
        )
        self._joined[connection.number] = connection
        return connection

    async def join_with(self, router: Router, name: str = "worker") -> Connection:
        """One more process, which answers requests itself."""
        connection = await connect(self.server.address, SECRET, name=name, router=router)
        await until(lambda: self.server.connections)
        return connection

    @property
    def all_arrived(self) -> bool:
        """Whether whatever one side of a connection has sent was read by the other."""
        return all(
            (here.sent_bytes, here.received_bytes) == (there.received_bytes, there.sent_bytes)
            for here in self.server.connections
            if (there := self._joined.get(here.number)) is not None and not there.closed
        )

    def sender(self, channel: Channel[T], connection: Connection, holder: str = "w") -> Sender[T]:
        """A sender for the process behind this connection."""
        ref = self.channels.end_ref(channel.sender, holder)
        end = ChannelClient(connection).end(ref, channel.item_type)
        assert isinstance(end, Sender)
        return end

    def receiver(
        self, channel: Channel[T], connection: Connection, holder: str = "w"
    ) -> Receiver[T]:
        """A receiver for the process behind this connection."""
        ref = self.channels.end_ref(channel.receiver, holder)
        end = ChannelClient(connection).end(ref, channel.item_type)
        assert isinstance(end, Receiver)
        return end

    def latest_receiver(self, latest: Latest[T], connection: Connection) -> LatestReceiver[T]:
        """A receiver of this `Latest` for the process behind this connection."""
        ref = self.channels.end_ref(latest.receiver, "w")
        end = ChannelClient(connection).end(ref, latest.item_type)
        assert isinstance(end, LatestReceiver)
        return end


@asynccontextmanager
async def wired(*, address: str | None = None, **options: Any) -> AsyncIterator[Wired]:
    """An owner of channels that others can `join`: on a Unix socket, or at this address."""
    router = Router()
    channels = ChannelServer(router)
    with tempfile.TemporaryDirectory(prefix="wire-") as folder:
        lost: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        async with await serve(
            address or Path(folder) / "owner.sock",
            SECRET,
            name="owner",
            router=router,
            on_disconnect=lambda connection, reason: lost.put_nowait((connection.peer, reason)),
            **options,
        ) as server:
            owner = Wired(channels, server)
            owner.lost = lost
            _owners.append(owner)
            try:
                yield owner
            finally:
                _owners.remove(owner)


async def settle() -> None:
    """Return once everybody waits and nothing is under way, on any connection of this process.

    A request and its reply need a few turns, and a task may answer in between.
    """
    for _ in range(4):
        await wait_all_blocked()
        await until(lambda: all(owner.all_arrived for owner in _owners))
        await asyncio.sleep(0)


@asynccontextmanager
async def remote_pair(
    channel: Channel[T], address: str | None = None
) -> AsyncIterator[tuple[Sender[T], Receiver[T]]]:
    """Ends of this channel as a worker in another process has them. Closed when the block ends."""
    async with wired(address=address) as owner:
        connection = await owner.join()
        sender, receiver = owner.sender(channel, connection), owner.receiver(channel, connection)
        try:
            yield sender, receiver
        finally:
            sender.close()
            receiver.close()
            connection.close()
            await connection.wait_closed()


@asynccontextmanager
async def remote_latest_pair(
    latest: Latest[T], address: str | None = None
) -> AsyncIterator[tuple[LatestSender[T], LatestReceiver[T]]]:
    """Ends of this `Latest` as a worker in another process has them."""
    async with wired(address=address) as owner:
        connection = await owner.join()
        client = ChannelClient(connection)
        sender = client.end(owner.channels.end_ref(latest.sender, "w"), latest.item_type)
        receiver = client.end(owner.channels.end_ref(latest.receiver, "w"), latest.item_type)
        assert isinstance(sender, LatestSender)
        assert isinstance(receiver, LatestReceiver)
        try:
            yield sender, receiver
        finally:
            connection.close()
            await connection.wait_closed()
