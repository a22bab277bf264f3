"""The known defects of known channels, each with the test that ours passes.

Numbered and named as on the semantics page.
"""

from __future__ import annotations

import asyncio

import pytest

from rlinf_async.channels import Channel, ChannelFailed, ChannelFull
from rlinf_async.channels.queue import statistics_of
from rlinf_async.testing import VirtualLoop, run_on
from tests.channels.transport import Transport


async def test_1_a_batch_get_that_cannot_use_the_head_does_not_hide_it_from_the_waiter_behind(
    transport: Transport,
) -> None:
    sender, receiver = await transport.ends(Channel(str, name="words"))
    batch = asyncio.create_task(receiver.get_batch(weight=4))
    await transport.settle()
    behind = asyncio.create_task(receiver.get())
    await transport.settle()
    await sender.put("first", weight=3)
    await transport.settle()
    assert not batch.done()
    await sender.put("does not fit the batch", weight=3)
    assert await batch == ["first"]
    assert await behind == "does not fit the batch"


async def test_2_an_item_heavier_than_the_batch_does_not_block_the_head_for_ever(
    transport: Transport,
) -> None:
    sender, receiver = await transport.ends(Channel(str, name="words"))
    waiting = asyncio.create_task(receiver.get_batch(weight=4))
    await transport.settle()
    await sender.put("heavy", weight=9)
    assert await waiting == ["heavy"]
    await sender.put("heavy again", weight=9)
    await sender.put("light", weight=4)
    assert await receiver.get_batch(weight=4) == ["heavy again"]
    assert await receiver.get_batch(weight=4) == ["light"]


async def test_3_an_error_at_the_far_side_reaches_the_caller_and_later_calls_go_on(
    transport: Transport,
) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    with pytest.raises(ValueError, match="weight=0"):
        await receiver.get_batch(weight=0, key="env")
    await sender.put(1, key="env")
    assert await receiver.get_batch(weight=1, key="env") == [1]
    waiting = asyncio.create_task(receiver.get(key="env"))
    await transport.settle()
    channel.fail("the far side broke")
    for use in (waiting, receiver.get(key="env")):
        with pytest.raises(ChannelFailed, match="the far side broke"):
            await use


async def test_4_a_batch_get_returns_items_and_not_a_coroutine(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await sender.put(1)
    batch = await receiver.get_batch(weight=1)
    assert isinstance(batch, list)
    assert batch == [1]


async def test_5_concurrent_gets_on_one_end_each_take_their_own_reply(
    transport: Transport,
) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    keys = [f"env {number}" for number in range(8)]
    gets = [asyncio.create_task(receiver.get(key=key)) for key in keys]
    batches = [asyncio.create_task(receiver.get_batch(weight=2, key=key)) for key in (1, 2)]
    await transport.settle()
    for number in reversed(range(8)):
        await sender.put(number, key=keys[number])
    for number in (10, 20, 11, 21):
        await sender.put(number, key=number // 10)
    assert await asyncio.gather(*gets) == list(range(8))
    assert await asyncio.gather(*batches) == [[10, 11], [20, 21]]


async def test_6_a_consumer_that_dies_does_not_take_its_items_with_it(
    transport: Transport,
) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    for number in range(3):
        await sender.put(number)

    async def consume() -> None:
        async with receiver.lease(weight=2):
            await asyncio.Event().wait()

    dying = [asyncio.create_task(consume()), asyncio.create_task(receiver.get(key="env"))]
    await transport.settle()
    channel.sender.put_nowait(3, key="env")  # handed to the get, whose task cannot have run
    for task in dying:
        task.cancel()
    await asyncio.gather(*dying, return_exceptions=True)
    assert [await receiver.get() for _ in range(3)] == [0, 1, 2]
    assert await receiver.get(key="env") == 3


async def test_7_weight_is_an_amount_and_no_priority(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(str, name="words"))
    for word, weight in (("light", 1), ("heavy", 9), ("middle", 5)):
        await sender.put(word, weight=weight)
    assert [await receiver.get() for _ in range(3)] == ["light", "heavy", "middle"]


async def test_8_a_workers_error_arrives_with_its_cause(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    waiting = asyncio.create_task(receiver.get())
    await transport.settle()
    try:
        raise ZeroDivisionError("reward over 0 steps")
    except ZeroDivisionError as error:
        sender.fail(error)
    with pytest.raises(ChannelFailed, match="'numbers' failed: ZeroDivisionError: reward over 0"):
        await waiting


async def test_9_a_full_channel_drops_nothing(transport: Transport) -> None:
    channel = Channel(int, name="numbers", capacity=2)
    sender, receiver = await transport.ends(channel)

    async def produce() -> None:
        with sender:
            for number in range(50):
                await sender.put(number)

    producing = asyncio.create_task(produce())
    await transport.settle()
    assert statistics_of(channel.queue).depth == 2
    assert [number async for number in receiver] == list(range(50))
    await producing


def test_9_an_idle_channel_takes_no_time_of_the_loop() -> None:
    loop = VirtualLoop(seed=0)

    async def main() -> int:
        channel = Channel(int, name="numbers")
        waiting = asyncio.create_task(channel.receiver.get())
        await asyncio.sleep(1)  # virtual: the clock jumps
        before = loop.steps
        await asyncio.sleep(3_600)
        idle_steps = loop.steps - before
        channel.sender.put_nowait(1)
        assert await waiting == 1
        return idle_steps

    assert run_on(loop, main()) <= 3  # the sleep's own


def test_9_no_channel_is_unbounded_by_default() -> None:
    channel = Channel(int, name="numbers")
    assert 1 <= statistics_of(channel.queue).capacity <= 1_000
    for number in range(statistics_of(channel.queue).capacity):
        channel.sender.put_nowait(number)
    with pytest.raises(ChannelFull):
        channel.sender.put_nowait(-1)
