"""A cancelled wait changes nothing: items stay, nothing half is left, and nobody else is stuck."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import pytest

from rlinf_async.channels import Channel, ChannelEmpty, EndOfChannel
from rlinf_async.channels.queue import statistics_of
from rlinf_async.testing import nothing_left_waiting
from tests.channels.transport import Transport

T = TypeVar("T")


async def cancelled(task: asyncio.Task[T]) -> None:
    """Cancel a task and wait for it."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_get_cancelled_while_it_waits_takes_nothing(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    waiting = asyncio.create_task(receiver.get())
    await transport.settle()
    await cancelled(waiting)
    await sender.put(1)
    assert await receiver.get() == 1


async def test_a_get_cancelled_after_it_was_handed_its_item_gives_it_back(
    transport: Transport,
) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    waiting = asyncio.create_task(receiver.get())
    await transport.settle()
    channel.sender.put_nowait(1)  # here, at the queue: the getter cannot have run
    await cancelled(waiting)
    await sender.put(2)
    assert [await receiver.get(), await receiver.get()] == [1, 2]
    assert statistics_of(channel.queue).gets == 2


async def test_a_batch_cancelled_after_it_was_handed_its_items_gives_them_back(
    transport: Transport,
) -> None:
    channel = Channel(int, name="numbers")
    _, receiver = await transport.ends(channel)
    waiting = asyncio.create_task(receiver.get_batch(weight=3))
    await transport.settle()
    for number in range(4):
        channel.sender.put_nowait(number)
    await cancelled(waiting)
    assert [await receiver.get() for _ in range(4)] == [0, 1, 2, 3]


async def test_a_batch_cancelled_while_it_collects_gives_its_items_to_the_next(
    transport: Transport,
) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    batch = asyncio.create_task(receiver.get_batch(weight=3))
    await transport.settle()
    await sender.put(0)
    await sender.put(1)
    behind = asyncio.create_task(receiver.get())
    await transport.settle()
    assert not behind.done()
    await cancelled(batch)
    assert [await behind, await receiver.get()] == [0, 1]


async def test_a_put_cancelled_while_it_waits_leaves_no_item(transport: Transport) -> None:
    channel = Channel(int, name="numbers", capacity=1)
    sender, receiver = await transport.ends(channel)
    await sender.put(0)
    waiting = asyncio.create_task(sender.put(1))
    await transport.settle()
    await cancelled(waiting)
    await transport.settle()
    assert statistics_of(channel.queue).puts == 1
    assert await receiver.get() == 0
    await sender.put(2)
    assert await receiver.get() == 2


async def test_a_put_cancelled_after_it_was_let_in_leaves_no_item(transport: Transport) -> None:
    channel = Channel(int, name="numbers", capacity=1)
    sender, receiver = await transport.ends(channel)
    await sender.put(0)
    waiting = asyncio.create_task(sender.put(1))
    await transport.settle()
    assert channel.receiver.get_nowait() == 0  # here, at the queue: the putter cannot have run
    await cancelled(waiting)
    await transport.settle()
    assert statistics_of(channel.queue).puts == 1
    assert statistics_of(channel.queue).depth == 0
    await sender.put(2)
    assert await receiver.get() == 2


async def test_a_cancelled_put_lets_a_lighter_one_behind_it_in(transport: Transport) -> None:
    channel = Channel(str, name="words", capacity=8, max_weight=4)
    sender, receiver = await transport.ends(channel)
    await sender.put("first", weight=3)
    heavy = asyncio.create_task(sender.put("heavy", weight=4))
    await transport.settle()
    light = asyncio.create_task(sender.put("light", weight=1))
    await transport.settle()
    assert not light.done()
    await cancelled(heavy)
    await light
    assert [await receiver.get(), await receiver.get()] == ["first", "light"]


async def test_a_cancelled_put_and_a_cancelled_get_are_not_counted(transport: Transport) -> None:
    channel = Channel(int, name="numbers", capacity=1)
    sender, receiver = await transport.ends(channel)
    await sender.put(0)
    waiting: list[asyncio.Task[object]] = [
        asyncio.create_task(sender.put(1)),
        asyncio.create_task(receiver.get(key="env")),
    ]
    await transport.settle()
    for task in waiting:
        await cancelled(task)
    assert await receiver.get() == 0
    await transport.settle()
    seen = statistics_of(channel.queue)
    assert (seen.puts, seen.gets, seen.waiting_putters, seen.waiting_getters) == (1, 1, 0, 0)
    nothing_left_waiting(channel)


async def test_a_timeout_on_a_get_takes_nothing(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await receiver.get()
    await sender.put(1)
    assert await receiver.get() == 1


async def test_a_lease_cancelled_while_it_waits_holds_nothing(transport: Transport) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)

    async def hold() -> None:
        async with receiver.lease(weight=2):
            pytest.fail("the lease was granted")

    waiting = asyncio.create_task(hold())
    await transport.settle()
    await sender.put(1)
    await cancelled(waiting)
    assert await receiver.get() == 1
    assert statistics_of(channel.queue).leases_out == 0


async def test_a_lease_cancelled_inside_puts_its_items_back_in_order(
    transport: Transport,
) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    for number in range(4):
        await sender.put(number)

    async def hold() -> None:
        async with receiver.lease(weight=2):
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await transport.settle()
    assert statistics_of(channel.queue).leases_out == 2
    await cancelled(holding)
    assert [await receiver.get() for _ in range(4)] == [0, 1, 2, 3]


async def test_waiters_cancelled_at_the_same_moment_lose_nothing(transport: Transport) -> None:
    channel = Channel(int, name="numbers", capacity=2)
    sender, receiver = await transport.ends(channel)
    gets = [asyncio.create_task(receiver.get()) for _ in range(6)]
    await transport.settle()
    for number in range(4):
        channel.sender.put_nowait(number)
    for task in gets[::2]:
        task.cancel()
    done = await asyncio.gather(*gets[:4], return_exceptions=True)
    got = [result for result in done if isinstance(result, int)]
    sender.close()
    channel.sender.close()
    rest = [number async for number in receiver]
    late = await asyncio.gather(*gets[4:], return_exceptions=True)
    got += rest + [result for result in late if isinstance(result, int)]
    assert sorted(got) == [0, 1, 2, 3]


async def test_get_nowait_takes_what_a_cancelled_batch_had_collected() -> None:
    channel = Channel(int, name="numbers")
    getting = asyncio.create_task(channel.receiver.get_batch(weight=3))
    await asyncio.sleep(0)
    for number in range(2):
        channel.sender.put_nowait(number)
    with pytest.raises(ChannelEmpty):  # they are for the batch, which came first
        channel.receiver.get_nowait()
    getting.cancel()  # its task has not run yet
    assert [channel.receiver.get_nowait() for _ in range(2)] == [0, 1]
    await asyncio.wait([getting])
    assert statistics_of(channel.queue).gets == 2
    nothing_left_waiting(channel)


async def test_get_nowait_that_finds_the_end_leaves_nothing_behind() -> None:
    channel = Channel(int, name="numbers")
    getting = asyncio.create_task(channel.receiver.get())
    await asyncio.sleep(0)
    getting.cancel()
    channel.close()
    with pytest.raises(EndOfChannel):
        channel.receiver.get_nowait()
    await asyncio.wait([getting])
    nothing_left_waiting(channel)
