"""FIFO for each key, and whoever waits is served in arrival order, each receiver in turn."""

from __future__ import annotations

import asyncio

import pytest

from rlinf_async.channels import Channel, Receiver
from rlinf_async.channels.queue import statistics_of
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


async def test_receivers_that_wait_are_served_in_turn(transport: Transport) -> None:
    """However many gets each of them has waiting: so that workers share out what there is."""
    sender, greedy = await transport.ends(Channel(int, name="numbers"))
    modest = greedy.clone()
    got: list[tuple[str, int]] = []

    async def take(name: str, receiver: Receiver[int]) -> None:
        got.append((name, await receiver.get()))

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(take("greedy", greedy))
            await transport.settle()
        for _ in range(2):
            group.create_task(take("modest", modest))
            await transport.settle()
        for number in range(6):
            await sender.put(number)
            await transport.settle()
    names = [name for name, _ in sorted(got, key=lambda one: one[1])]
    assert names == ["greedy", "modest", "greedy", "modest", "greedy", "greedy"]
    modest.close()


async def test_a_receiver_that_comes_back_waits_behind_every_other(transport: Transport) -> None:
    sender, patient = await transport.ends(Channel(int, name="numbers"))
    eager = patient.clone()
    waiting = [asyncio.create_task(patient.get()) for _ in range(2)]
    await transport.settle()
    got: list[int] = []

    async def come_back() -> None:
        got.extend([number async for number in eager])

    coming = asyncio.create_task(come_back())
    await transport.settle()
    for number in range(5):
        await sender.put(number)
        await transport.settle()
    assert sorted(await asyncio.gather(*waiting)) == [0, 2]
    sender.close()
    await coming
    assert got == [1, 3, 4]
    eager.close()


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


async def test_items_keep_their_order_when_credit_is_spent_while_a_put_waits() -> None:
    """Credit is room that was reserved before: its items come in ahead of a put that waits."""
    channel = Channel(str, name="letters", capacity=2)
    queue = channel.queue.unkeyed
    await channel.sender.put("a")
    queue.reserve(1, 0)
    waiting = asyncio.create_task(channel.sender.put("c"))
    await asyncio.sleep(0)
    assert statistics_of(channel.queue).waiting_putters == 1
    queue.reserve(-1, 0)
    queue.put_on_credit(["b"], 1)
    assert await channel.receiver.get() == "a"
    await waiting

    async def fail() -> None:
        async with channel.receiver.lease() as leased:
            assert [*leased] == ["b"]
            raise LookupError

    with pytest.raises(LookupError):
        await fail()
    assert [channel.receiver.get_nowait() for _ in range(2)] == ["b", "c"]
