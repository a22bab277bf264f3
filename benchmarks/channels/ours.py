"""Our side of the two-process cases, by the public API: a cluster, a worker, channels.

    python ours.py items | echo | calls | arrays [process | ray]

A channel lives in the process that made it, the driver's. So "two processes" has two directions: a
worker puts and the driver gets, or the other way round. Both are measured, and the slower one is
the figure that the bars judge. ``between_workers`` goes from one worker to another.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import rlinf_async as ra
from benchmarks.channels import kit
from rlinf_async.channels import NoReceivers
from rlinf_async.runtime.calls import WorkerRef

Measured = dict[str, float]


class Side(ra.Worker):
    """The other process."""

    async def on_first_core(self) -> None:
        kit.own_core(0)

    async def put_items(self, items: ra.Sender[kit.Item]) -> None:
        await put_items(items)

    async def get_items(self, items: ra.Receiver[kit.Item]) -> float:
        return await items_per_s(items)

    async def put_blocks(self, blocks: ra.Sender[kit.Block], elements: int) -> None:
        await put_blocks(blocks, elements)

    async def get_blocks(self, blocks: ra.Receiver[kit.Block]) -> float:
        return await blocks_per_s(blocks)

    async def answer(self, pings: ra.Receiver[kit.Item], pongs: ra.Sender[kit.Item]) -> None:
        async for ping in pings:
            await pongs.put(ping)

    async def same(self, item: kit.Item) -> kit.Item:
        return item


async def put_items(items: ra.Sender[kit.Item]) -> None:
    """Until nobody takes any more."""
    with contextlib.suppress(NoReceivers):
        while True:
            await items.put(kit.ITEM)


async def put_blocks(blocks: ra.Sender[kit.Block], elements: int) -> None:
    """Until nobody takes any more."""
    with contextlib.suppress(NoReceivers):
        for number, values in enumerate(kit.sources(elements)):
            await blocks.put(kit.Block(number, values))


async def items_per_s(
    items: ra.Receiver[kit.Item], warm_up: float = kit.WARM_UP, seconds: float = kit.SECONDS
) -> float:
    with items:
        return await kit.rate(items.get, warm_up=warm_up, seconds=seconds)


async def blocks_per_s(
    blocks: ra.Receiver[kit.Block], warm_up: float = kit.WARM_UP, seconds: float = kit.SECONDS
) -> float:
    async def take() -> None:
        kit.touch((await blocks.get()).values)

    with blocks:
        return await kit.rate(take, every=1, warm_up=warm_up, seconds=seconds)


async def items(cluster: ra.Cluster) -> Measured:
    """Small messages, each way."""
    sides = await cluster.launch(Side, count=2)
    here, there = sides[0], sides[1]

    def channel(name: str) -> ra.Channel[kit.Item]:
        return cluster.channel(kit.Item, name=name, capacity=kit.CAPACITY)

    into, out, between = channel("into"), channel("out"), channel("between")
    to_driver, _ = await asyncio.gather(
        items_per_s(into.receiver), here.call(Side.put_items, into.sender)
    )
    from_driver, _ = await asyncio.gather(
        here.call(Side.get_items, out.receiver), put_items(out.sender)
    )
    between_workers, _ = await asyncio.gather(
        there.call(Side.get_items, between.receiver), here.call(Side.put_items, between.sender)
    )
    return {
        "items_per_s": min(to_driver, from_driver),
        "to_driver": to_driver,
        "from_driver": from_driver,
        "between_workers": between_workers,
    }


async def apart(cluster: ra.Cluster) -> WorkerRef[Side]:
    """A worker on a core of its own, and this process on another."""
    [side] = await cluster.launch(Side)
    await side.call(Side.on_first_core)
    kit.own_core(1)
    return side


async def echo(cluster: ra.Cluster) -> Measured:
    """A message to the worker and back, by two channels."""
    side = await apart(cluster)
    pings = cluster.channel(kit.Item, name="pings")
    pongs = cluster.channel(kit.Item, name="pongs")
    answering = side.call(Side.answer, pings.receiver, pongs.sender)
    with pings.sender as asked, pongs.receiver as answers:

        async def there_and_back() -> None:
            await asked.put(kit.ITEM)
            await answers.get()

        measured = await kit.latencies(there_and_back)
    await answering
    return measured


async def calls(cluster: ra.Cluster) -> Measured:
    """Calls of a method, one after the other and many together."""
    side = await apart(cluster)
    measured = await kit.latencies(lambda: side.call(Side.same, kit.ITEM))

    async def together() -> None:
        await asyncio.gather(*(side.call(Side.same, kit.ITEM) for _ in range(kit.IN_FLIGHT)))

    waves = await kit.rate(together, every=1)
    return {**measured, "in_flight_per_s": waves * kit.IN_FLIGHT}


async def arrays(cluster: ra.Cluster) -> Measured:
    """Arrays of each size, each way."""
    sides = await cluster.launch(Side, count=2)
    measured = {}
    for name, elements in kit.ARRAYS.items():
        for where, rate in (await directions(cluster, sides, name, elements)).items():
            measured[f"{where}_{name}"] = kit.gb_per_s(rate, elements)
    return measured


async def directions(
    cluster: ra.Cluster, sides: ra.WorkerGroup[Side], name: str, elements: int
) -> Measured:
    """Arrays per second, each way."""
    here, there = sides[0], sides[1]

    def channel(where: str) -> ra.Channel[kit.Block]:
        return cluster.channel(kit.Block, name=f"{where} {name}", capacity=kit.ARRAY_CAPACITY)

    into, out, between = channel("into"), channel("out"), channel("between")
    to_driver, _ = await asyncio.gather(
        blocks_per_s(into.receiver), here.call(Side.put_blocks, into.sender, elements)
    )
    from_driver, _ = await asyncio.gather(
        here.call(Side.get_blocks, out.receiver), put_blocks(out.sender, elements)
    )
    between_workers, _ = await asyncio.gather(
        there.call(Side.get_blocks, between.receiver),
        here.call(Side.put_blocks, between.sender, elements),
    )
    return {
        "gb_per_s": min(to_driver, from_driver),
        "to_driver": to_driver,
        "from_driver": from_driver,
        "between_workers": between_workers,
    }


async def main(what: str, backend: str = "process") -> None:
    measure = {"items": items, "echo": echo, "calls": calls, "arrays": arrays}[what]
    async with ra.Cluster.ray() if backend == "ray" else ra.Cluster.process() as cluster:
        kit.done(**await measure(cluster))


if __name__ == "__main__":
    ra.run(main(*sys.argv[1:]))
