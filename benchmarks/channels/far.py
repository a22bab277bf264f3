"""What the two hosts of `hosts` do: one owns channels, or raw sockets; the other measures.

    python -m benchmarks.channels.far  ours | tls | raw  good | bad  owner | worker

``tls`` is ours, encrypted. Both directions are measured, by whoever receives; the slower one
counts. Over the bad cable round trips are fewer, and arrays are of 256 KiB; the channels have more
room, because what is on the way counts.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import uvloop

import rlinf_async as ra
from benchmarks.channels import kit, ours, raw
from rlinf_async.channels.wire import (
    ChannelClient,
    ChannelServer,
    EndRef,
    Router,
    connect,
    load_secret,
    serve,
)
from rlinf_async.channels.wire.session.connection import Request
from tests.net.hosts import OWNER

PORTS = {"ours": 7000, "echo": 7001, "items": 7002, "stream": 7003}
CALLS = {"good": kit.CALLS, "bad": 40}
ELEMENTS = {"good": kit.ARRAYS["4mb"], "bad": 1 << 16}
"""of the arrays: 4 MiB, and where that would take seconds, 256 KiB"""
CAPACITY = {"good": kit.CAPACITY, "bad": 128 * kit.CAPACITY}
"""of items; it also bounds what is on the way"""
ARRAY_CAPACITY = {"good": kit.ARRAY_CAPACITY, "bad": 4 * kit.ARRAY_CAPACITY}
BRIEF = "RLINF_ASYNC_BENCH_BRIEF" in os.environ
"""whether a figure of any kind will do: in the tests"""
SECONDS = (
    {"good": (0.2, 0.5), "bad": (0.2, 0.5)}
    if BRIEF
    else {"good": (kit.WARM_UP, kit.SECONDS), "bad": (8.0, 5.0)}
)
"""of warm-up, and of measuring: over the bad cable TCP's congestion control takes seconds to find
the bandwidth of a connection that carried little before"""
SIZE = {"good": "4mb", "bad": "256kb"}


class Wanted(msgspec.Struct):
    """worker -> owner: what are my ends?"""


class Ends(msgspec.Struct):
    """owner -> worker: these, by name."""

    refs: dict[str, EndRef]


def secret() -> bytes:
    """The one that `hosts` drew for both sides."""
    found = load_secret()
    if found is None:
        raise SystemExit("run hosts.py: it gives both sides a secret")
    return found


class Channels:
    """All that both sides talk over."""

    def __init__(self, cable: str) -> None:
        arrays = ARRAY_CAPACITY[cable]
        self.into = ra.Channel(kit.Item, name="into", capacity=CAPACITY[cable])
        self.out = ra.Channel(kit.Item, name="out", capacity=CAPACITY[cable])
        self.pings = ra.Channel(kit.Item, name="pings")
        self.pongs = ra.Channel(kit.Item, name="pongs")
        self.blocks_into = ra.Channel(kit.Block, name="blocks into", capacity=arrays)
        self.blocks_out = ra.Channel(kit.Block, name="blocks out", capacity=arrays)
        self.found = ra.Channel(dict[str, float], name="found")

    def ends(self, server: ChannelServer) -> dict[str, EndRef]:
        """The worker's."""
        senders = (self.into, self.pings, self.blocks_into)
        receivers = (self.out, self.pongs, self.blocks_out, self.found)
        every: list[Any] = [channel.sender for channel in senders]
        every += [channel.receiver for channel in receivers]
        return {end.channel_name: server.end_ref(end, "worker") for end in every}


async def own(cable: str, scheme: str) -> None:
    """Own the channels, and be the other side of each case, in turn."""
    router, channels = Router(), Channels(cable)
    server = ChannelServer(router)

    def ends(request: Request[Wanted]) -> None:
        request.reply(Ends(channels.ends(server)))

    router.add_sync("ends", Wanted, ends)
    address = f"{scheme}://{OWNER}:{PORTS['ours']}"
    async with await serve(address, secret(), router=router, name="owner"):
        print("ready", flush=True)
        found = {"items_to_owner": await ours.items_per_s(channels.into.receiver, *SECONDS[cable])}
        await ours.put_items(channels.out.sender)
        with channels.pongs.sender as pongs:
            async for ping in channels.pings.receiver:
                await pongs.put(ping)
        elements = ELEMENTS[cable]
        blocks = await ours.blocks_per_s(channels.blocks_into.receiver, *SECONDS[cable])
        found["gb_per_s_to_owner"] = kit.gb_per_s(blocks, elements)
        await ours.put_blocks(channels.blocks_out.sender, elements)
        await channels.found.sender.put(found)
        await asyncio.Event().wait()  # until it is killed


async def visit(cable: str, scheme: str) -> dict[str, float]:
    """Be the worker."""
    address = f"{scheme}://{OWNER}:{PORTS['ours']}"
    connection = await connect(address, secret(), name="worker", router=Router())
    refs = (await connection.request("ends", Wanted(), reply=Ends))[0].refs
    client = ChannelClient(connection)

    def end(name: str, item_type: Any) -> Any:
        return client.end(refs[name], item_type)

    await ours.put_items(end("into", kit.Item))
    items = await ours.items_per_s(end("out", kit.Item), *SECONDS[cable])
    with end("pings", kit.Item) as pings, end("pongs", kit.Item) as pongs:

        async def there_and_back() -> None:
            await pings.put(kit.ITEM)
            await pongs.get()

        measured = await kit.latencies(there_and_back, CALLS[cable])
    elements = ELEMENTS[cable]
    await ours.put_blocks(end("blocks into", kit.Block), elements)
    blocks = await ours.blocks_per_s(end("blocks out", kit.Block), *SECONDS[cable])
    found = await end("found", dict[str, float]).get()
    connection.close()
    await connection.wait_closed()
    from_owner = kit.gb_per_s(blocks, elements)
    return {
        "items_per_s": min(items, found["items_to_owner"]),
        "items_from_owner": items,
        **measured,
        f"gb_per_s_{SIZE[cable]}": min(from_owner, found["gb_per_s_to_owner"]),
        "gb_per_s_from_owner": from_owner,
        **found,
    }


class Streaming(raw.Writing):
    """Writes bytes for as long as somebody reads."""

    block = bytes(1 << 18)

    def write(self) -> None:
        if self.paused or self.transport.is_closing():
            return
        self.transport.write(self.block)
        asyncio.get_running_loop().call_soon(self.write)


class Counting(asyncio.Protocol):
    """Counts bytes."""

    count = 0

    def data_received(self, data: bytes) -> None:
        self.count += len(data)


async def own_raw() -> None:
    """Serve the raw sockets."""
    loop = asyncio.get_running_loop()
    for name, protocol in (("echo", raw.Echo), ("items", raw.Writing), ("stream", Streaming)):
        await loop.create_server(protocol, OWNER, PORTS[name])
    print("ready", flush=True)
    await asyncio.Event().wait()  # until it is killed


async def visit_raw(cable: str) -> dict[str, float]:
    """Measure them."""
    loop = asyncio.get_running_loop()
    _, asking = await loop.create_connection(raw.Asking, OWNER, PORTS["echo"])
    question = b"x" * 64
    measured = await kit.latencies(lambda: asking.ask(question), CALLS[cable])

    counted: list[int] = []
    reading, _ = await loop.create_connection(
        lambda: raw.Reading(counted.append), OWNER, PORTS["items"]
    )
    measured["items_per_s"] = await per_second(lambda: sum(counted), *SECONDS[cable])
    reading.abort()
    streaming, stream = await loop.create_connection(Counting, OWNER, PORTS["stream"])
    measured[f"gb_per_s_{SIZE[cable]}"] = (
        await per_second(lambda: stream.count, *SECONDS[cable]) / 1e9
    )
    streaming.abort()
    return measured


async def per_second(count: Callable[[], int], warm_up: float, seconds: float) -> float:
    """How much more it is after a second; a lossy cable is given until there is more at all."""
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(warm_up)
    before, start = count(), clock()
    more = 0
    while not more:
        await asyncio.sleep(seconds)
        more = count() - before
    return more / (clock() - start)


async def main(what: str, cable: str, side: str) -> None:
    kit.own_core(1 if side == "owner" else 0)
    scheme = {"ours": "tcp", "tls": "tls"}.get(what)
    if side == "owner":
        await (own_raw() if scheme is None else own(cable, scheme))
    else:
        kit.done(**await (visit_raw(cable) if scheme is None else visit(cable, scheme)))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
