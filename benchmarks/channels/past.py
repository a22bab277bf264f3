"""Arrays of 4 MiB between two workers of one host, of a channel whose owner is on the other.

    python -m benchmarks.channels.past  past  good | bad  owner | worker | through | past

Once through the owner, over the cable twice, and once past it, as two processes with a `Direct`
send them. The worker measures; the last two are the producers that it starts beside itself.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvloop

import rlinf_async as ra
from benchmarks.channels import kit, ours
from benchmarks.channels.far import PORTS, secret
from rlinf_async.channels.wire import (
    ChannelClient,
    ChannelServer,
    Direct,
    EndRef,
    Request,
    Router,
    connect,
    serve,
)
from rlinf_async.channels.wire.direct.direct import Use
from tests.net.hosts import OWNER

WAYS = ("through", "past")
ELEMENTS = kit.ARRAYS["4mb"]


class Wanted(msgspec.Struct):
    """producer, consumer -> owner: what is my end of this channel?"""

    kind: str
    way: str


async def own() -> None:
    """Own a channel for each way."""
    router = Router()
    server = ChannelServer(router)
    channels = {way: ra.Channel(kit.Block, name=way, capacity=kit.ARRAY_CAPACITY) for way in WAYS}

    def end(request: Request[Wanted]) -> None:
        wanted = request.meta
        found = getattr(channels[wanted.way], wanted.kind)
        request.reply(server.end_ref(found, f"{wanted.kind} {wanted.way}"))

    router.add_sync("end", Wanted, end)
    async with await serve(f"tcp://{OWNER}:{PORTS['ours']}", secret(), router=router, name="owner"):
        print("ready", flush=True)
        await asyncio.Event().wait()  # until it is killed


@asynccontextmanager
async def end_of(kind: str, way: str) -> AsyncIterator[Any]:
    """An end of one of the channels, in a process that has a `Direct` if it is to go past."""
    address = f"tcp://{OWNER}:{PORTS['ours']}"
    connection = await connect(address, secret(), name=f"{kind} {way}", router=Router())
    ref, _ = await connection.request("end", Wanted(kind, way), reply=EndRef)
    use: Use = "auto" if way == "past" else "never"
    direct = await Direct.of_worker(connection, secret(), name=kind, use=use)
    yield ChannelClient(connection, direct).end(ref, kit.Block)
    connection.close()
    await connection.wait_closed()
    if direct is not None:
        await direct.close()


async def produce(way: str) -> None:
    """Put arrays until nobody takes any more."""
    async with end_of("sender", way) as blocks:
        await ours.put_blocks(blocks, ELEMENTS)


async def take(way: str, cable: str) -> float:
    """Get arrays from a producer beside this process; GB/s."""
    async with end_of("receiver", way) as blocks:
        command = (sys.executable, "-m", __spec__.name, "past", cable, way)
        producer = await asyncio.create_subprocess_exec(*command)
        rate = await ours.blocks_per_s(blocks)
        await producer.wait()
    return kit.gb_per_s(rate, ELEMENTS)


async def main(what: str, cable: str, side: str) -> None:
    if side == "owner":
        await own()
    elif side in WAYS:
        await produce(side)
    else:
        kit.done(**{f"gb_per_s_{way}": await take(way, cable) for way in WAYS})


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
