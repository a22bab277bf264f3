"""FIFO for each key, and whoever waits is served in arrival order."""

from __future__ import annotations

import asyncio

from rlinf_async.channels import Channel
from tests.channels.transport import Transport


async def test_items_come_out_in_the_order_in_which_they_were_put(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers", capacity=8))
    for number in range(8):
        await sender.put(number)
    assert [await receiver.get() for _ in range(8)] == list(range(8))


async def test_order_holds_across_a_full_channel(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers", capacity=2))

    async def produce() -> None:
        with sender:
            for number in range(20):
                await sender.put(number)

    producing = asyncio.create_task(produce())
    assert [number async for number in receiver] == list(range(20))
    await producing


async def test_waiting_gets_are_served_in_arrival_order(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    tasks: list[asyncio.Task[int]] = []
    for _ in range(4):
        tasks.append(asyncio.create_task(receiver.get()))
        await transport.settle()
    for number in range(4):
        await sender.put(number)
    assert await asyncio.gather(*tasks) == [0, 1, 2, 3]


async def test_waiting_puts_are_let_in_in_arrival_order(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers", capacity=1))
    await sender.put(0)
    tasks: list[asyncio.Task[None]] = []
    for number in range(1, 5):
        tasks.append(asyncio.create_task(sender.put(number)))
        await transport.settle()
    assert [await receiver.get() for _ in range(5)] == [0, 1, 2, 3, 4]
    await asyncio.gather(*tasks)


async def test_a_put_cannot_overtake_one_that_waits(transport: Transport) -> None:
    channel = Channel(str, name="words", capacity=8, max_weight=4)
    sender, receiver = await transport.ends(channel)
    await sender.put("first", weight=3)
    heavy = asyncio.create_task(sender.put("heavy", weight=3))
    await transport.settle()
    light = asyncio.create_task(sender.put("light", weight=1))
    await transport.settle()
    assert [await receiver.get() for _ in range(3)] == ["first", "heavy", "light"]
    await asyncio.gather(heavy, light)


async def test_a_get_cannot_overtake_a_batch_that_waits(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    batch = asyncio.create_task(receiver.get_batch(weight=2))
    await transport.settle()
    single = asyncio.create_task(receiver.get())
    await transport.settle()
    for number in range(3):
        await sender.put(number)
    assert (await batch, await single) == ([0, 1], 2)
