"""A real server, whose peer proved the secret and then says anything: others go on being served.

One input is one connection. It holds the ends of a channel of its own, so that what it says can
mean something; what it leaves behind when it goes must be nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec

from rlinf_async.channels import Channel, Latest
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import ChannelClient, ChannelServer, Connection, Router, protocol
from rlinf_async.channels.wire.frames import LAST_TYPE, pack_header
from rlinf_async.channels.wire.session.endpoint import Server, connect, serve
from rlinf_async.channels.wire.session.link import Handshake
from tests.fuzz.pieces import Pieces
from tests.fuzz.pure import SECRET, Broken

SECONDS: Final = 60.0
"""Within which whoever is not at fault is served, and whoever left is forgotten."""

TURNS: Final = 8


def _key(pieces: Pieces) -> str | None:
    return (None, "key")[pieces.byte() % 2]


def _small(pieces: Pieces) -> int:
    return pieces.byte() - 2


class Live:
    """One server, one honest peer, and one peer after the other that says anything."""

    def __init__(self) -> None:
        self.router = Router()
        self.channels = ChannelServer(self.router)
        self.kinds = sorted(route.kind for route in self.router.routes.values())
        self._loop = asyncio.new_event_loop()
        self._folder = TemporaryDirectory(prefix="fuzz-")
        self._server: Server
        self._honest: Connection
        self._left = asyncio.Event()
        self._round = self._lends = 0
        self._loop.run_until_complete(self._start())

    def close(self) -> None:
        self._loop.run_until_complete(self._stop())
        self._loop.close()
        self._folder.cleanup()

    def hear(self, data: bytes) -> None:
        """One connection says this."""
        self._loop.run_until_complete(self._hear(data))

    # ---- inside

    async def _start(self) -> None:
        path = Path(self._folder.name) / "s"
        self._server = await serve(
            path, SECRET, router=self.router, on_disconnect=lambda *_: self._left.set()
        )
        self._honest = await connect(path, SECRET, name="honest", router=Router())

    async def _stop(self) -> None:
        self._honest.close()
        await self._honest.wait_closed()
        await self._server.close()

    async def _hear(self, data: bytes) -> None:
        anything: Any = Any
        queue: Channel[Any] = Channel(anything, name="hostile", capacity=4)
        newest: Latest[Any] = Latest(anything, name="newest")
        refs = [
            self.channels.end_ref(end, "hostile")
            for end in (queue.sender, queue.receiver, newest.sender, newest.receiver)
        ]
        ends, self._lends = [ref.number for ref in refs], refs[0].queue
        self._left.clear()
        async with asyncio.timeout(SECONDS):
            await self._say(self._frames(Pieces(data), ends))
            await self._serve_honest()
            await self._left.wait()
        left = statistics_of(queue.queue)
        if left.leases_out or left.waiting_getters or left.waiting_putters:
            raise Broken(f"who left still holds something: {left}")
        for number in ends:
            self.channels.release(number)
        if queue.queue.senders or queue.queue.receivers:
            raise Broken(f"who left still has ends open: {statistics_of(queue.queue)}")
        for one in (queue, newest):
            self.channels.withdraw(one)

    def _frames(self, pieces: Pieces, ends: list[int]) -> Iterator[bytes]:
        """Frames whose lengths are right, most of them, about ends that are open. An empty one
        stands for time in which the server answers."""
        while pieces:
            kind = pieces.byte()
            if kind == 0:  # anything at all
                yield pieces.some()
                continue
            kind, number, flags = 1 + kind % LAST_TYPE, pieces.byte(), pieces.byte()
            head, data = self._head(pieces, ends), pieces.some()
            buffers = [pieces.some() for _ in range(pieces.byte() % 3)]
            table = b"".join(len(buffer).to_bytes(8, "little") for buffer in buffers)
            payload = b"".join((table, head, data, *buffers))
            yield pack_header(
                len(payload), kind, number, lane=flags >> 7, flags=flags & 15,
                tables=len(buffers), head=len(head), data=len(data),
            ) + payload  # fmt: skip

    def _head(self, pieces: Pieces, ends: list[int]) -> bytes:
        """What is asked for, of an end that is there; or any bytes."""
        which = pieces.byte()
        if which >= len(self.kinds):
            return pieces.some()
        kind, end = self.kinds[which].encode(), ends[pieces.byte() % len(ends)]
        if kind == b"channel.transfer":
            arguments = msgspec.msgpack.encode(self._transfer(pieces, end))
        elif kind == b"credit.return":
            credit = protocol.Credit(
                self._lends, _key(pieces), _small(pieces), _small(pieces) or None
            )
            arguments = msgspec.msgpack.encode(credit)
        elif kind in (b"delivery.taken", b"delivery.settle"):
            ranges = [
                (_small(pieces), _small(pieces), _small(pieces)) for _ in range(pieces.byte() % 4)
            ]
            settled: Any = protocol.Taken(ranges)
            if kind == b"delivery.settle":
                settled = protocol.Settle(ranges, _small(pieces))
            arguments = msgspec.msgpack.encode(settled)
        else:  # MessagePack of the other arguments, without the array's head
            rest, count = pieces.some(), 1 + pieces.byte() % 10
            arguments = bytes((0x90 | count,)) + msgspec.msgpack.encode(end) + rest
        return bytes((len(kind),)) + kind + arguments

    def _transfer(self, pieces: Pieces, end: int) -> protocol.Transfer:
        """Items for which credit may have been granted."""
        runs = [
            protocol.Run(self._lends, end, _key(pieces), _small(pieces), _small(pieces))
            for _ in range(pieces.byte() % 3)
        ]
        return protocol.Transfer(runs, [_small(pieces) for _ in range(pieces.byte() % 8)])

    async def _say(self, frames: Iterable[bytes]) -> None:
        """Connect, prove the secret, say it, and leave."""
        with socket.socket(socket.AF_UNIX) as peer:
            peer.setblocking(False)
            await self._loop.sock_connect(peer, str(self._server.path))
            handshake = Handshake("client", SECRET, "hostile")
            await self._loop.sock_sendall(peer, handshake.take_outgoing())
            while not handshake.done:
                handshake.feed(await self._loop.sock_recv(peer, 4096))
                await self._loop.sock_sendall(peer, handshake.take_outgoing())
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for frame in frames:
                    await self._loop.sock_sendall(peer, frame)
                    for _ in range(0 if frame else TURNS):
                        await asyncio.sleep(0)
                peer.shutdown(socket.SHUT_WR)
                while await self._loop.sock_recv(peer, 1 << 16):
                    pass  # until the server has heard all of it, and closed

    async def _serve_honest(self) -> None:
        """What the other peer puts comes back to it."""
        self._round += 1
        channel = Channel(int, name="honest", capacity=1)
        client = ChannelClient(self._honest)
        sender = client.end(self.channels.end_ref(channel.sender, "honest"), int)
        receiver = client.end(self.channels.end_ref(channel.receiver, "honest"), int)
        await sender.put(self._round)  # type: ignore[union-attr]
        if await receiver.get() != self._round:  # type: ignore[union-attr]
            raise Broken("an honest peer got another's item")
        self.channels.withdraw(channel)
