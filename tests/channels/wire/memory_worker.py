"""A process of its own that puts or takes large arrays, until it is killed or the channel ends."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.channels import Channel, Receiver, Sender
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import (
    ChannelClient,
    ChannelServer,
    EndRef,
    Router,
    connect,
    serve,
)
from tests.channels.wire.harness import SECRET

SIZE = 40_000


class Numbered(msgspec.Struct):
    """An item whose elements all say its number."""

    number: int
    values: NDArray[np.int64]


def check(one: Numbered) -> None:
    """Its elements are those that its producer wrote."""
    if not (one.values == one.number).all():
        raise AssertionError(f"item {one.number} arrived with {np.unique(one.values)}")


async def produce(sender: Sender[Numbered]) -> None:
    for number in range(1_000_000):
        await sender.put(Numbered(number, np.full(SIZE, number, np.int64)))


async def consume(receiver: Receiver[Numbered]) -> None:
    """Take them all, keep a few for a while, and write to them at the end."""
    kept: deque[Numbered] = deque()
    async for one in receiver:
        check(one)
        kept.append(one)
        if len(kept) > 3:
            oldest = kept.popleft()
            check(oldest)
            oldest.values[:] = -1


async def main(path: str, ref: EndRef) -> None:
    """Use the end until its channel is closed."""
    connection = await connect(path, SECRET, name=ref.kind, router=Router(), heartbeat_limit=60)
    end = ChannelClient(connection).end(ref, Numbered)
    if isinstance(end, Sender):
        await produce(end)
    elif isinstance(end, Receiver):
        await consume(end)
    connection.close("done")
    await connection.wait_closed()


async def own() -> None:
    """Own a channel, for a producer and a consumer whose arguments are printed."""
    router = Router()
    channels = ChannelServer(router)
    channel = Channel(Numbered, name="arrays", capacity=4)
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        async with await serve(Path(folder) / "s", SECRET, router=router) as server:
            for end in (channel.sender, channel.receiver):
                ref = msgspec.json.encode(channels.end_ref(end, "w")).decode()
                print(server.path, ref, sep="\n", flush=True)
            seen = 0
            while True:
                statistics = statistics_of(channel.queue)
                if statistics.gets - seen >= 10 and statistics.shared:
                    seen = statistics.gets
                    print(seen, flush=True)
                await asyncio.sleep(0.001)


if __name__ == "__main__":
    if sys.argv[1] == "own":
        asyncio.run(own())
    else:
        asyncio.run(main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=EndRef)))
