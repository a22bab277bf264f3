"""Arrays of 4 MiB between two workers of one host, of a channel whose owner is on the other.

    python -m benchmarks.channels.past  past  good | bad  owner | worker | through | past

Once through the owner, over the cable twice, and once past it, as two processes with a `Direct`
send them. The worker measures; the last two are the producers that it starts beside itself. What
the owner computes meanwhile is measured too, in cores for each GB/s that flows.
"""

from __future__ import annotations

import asyncio
import sys
import time
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
    Connection,
    Direct,
    EndRef,
    Router,
    connect,
    serve,
)
from rlinf_async.channels.wire.direct import Use
from rlinf_async.channels.wire.session.connection import Request
from tests.net.hosts import OWNER

WAYS = ("through", "past")
ELEMENTS = kit.ARRAYS["4mb"]


class Wanted(msgspec.Struct):
    """producer, consumer -> owner: what is my end of this channel?"""

    kind: str
    way: str


class Computed(msgspec.Struct):
    """consumer -> owner: how many seconds have you computed? And the answer."""

    seconds: float = 0.0


async def own() -> None:
    """Own a channel for each way."""
    router = Router()
    server = ChannelServer(router)
    channels = {way: ra.Channel(kit.Block, name=way, capacity=kit.ARRAY_CAPACITY) for way in WAYS}

    def end(request: Request[Wanted]) -> None:
        wanted = request.meta
        found = getattr(channels[wanted.way], wanted.kind)
        request.reply(server.end_ref(found, f"{wanted.kind} {wanted.way}"))

    def computed(request: Request[Computed]) -> None:
        request.reply(Computed(time.process_time()))

    router.add_sync("end", Wanted, end)
    router.add_sync("computed", Computed, computed)
    async with await serve(f"tcp://{OWNER}:{PORTS['ours']}", secret(), router=router, name="owner"):
        print("ready", flush=True)
        await asyncio.Event().wait()  # until it is killed


@asynccontextmanager
async def end_of(kind: str, way: str) -> AsyncIterator[tuple[Any, Connection]]:
    """An end of one of the channels, in a process that has a `Direct` if it is to go past."""
    address = f"tcp://{OWNER}:{PORTS['ours']}"
    connection = await connect(address, secret(), name=f"{kind} {way}", router=Router())
    ref, _ = await connection.request("end", Wanted(kind, way), reply=EndRef)
    use: Use = "auto" if way == "past" else "never"
    direct = await Direct.of_worker(connection, secret(), name=kind, use=use)
    yield ChannelClient(connection, direct).end(ref, kit.Block), connection
    connection.close()
    await connection.wait_closed()
    if direct is not None:
        await direct.close()


async def produce(way: str) -> None:
    """Put arrays until nobody takes any more."""
    async with end_of("sender", way) as (blocks, _):
        await ours.put_blocks(blocks, ELEMENTS)


async def take(way: str, cable: str) -> dict[str, float]:
    """Get arrays from a producer beside this process: GB/s, and what the owner computes."""
    async with end_of("receiver", way) as (blocks, owner):
        command = (sys.executable, "-m", __spec__.name, "past", cable, way)
        producer = await asyncio.create_subprocess_exec(*command)
        await blocks.get()  # it is there
        before, start = await computed(owner), time.perf_counter()
        rate = kit.gb_per_s(await ours.blocks_per_s(blocks), ELEMENTS)
        share = (await computed(owner) - before) / (time.perf_counter() - start)
        await producer.wait()
    return {f"gb_per_s_{way}": rate, f"owner_cores_per_gb_per_s_{way}": share / rate}


async def computed(owner: Connection) -> float:
    """Seconds that the owner has computed so far."""
    found, _ = await owner.request("computed", Computed(), reply=Computed)
    return found.seconds


async def main(what: str, cable: str, side: str) -> None:
    if side == "owner":
        await own()
    elif side in WAYS:
        await produce(side)
    else:
        found: dict[str, float] = {}
        for way in WAYS:
            found |= await take(way, cable)
        kit.done(**found)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
