"""Keys route an item to one consumer."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import pytest

from rlinf_async.channels import Channel, EndOfChannel
from tests.channels.transport import Transport

T = TypeVar("T")


async def test_an_item_reaches_only_who_asks_for_its_key(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(str, name="actions"))
    plain = asyncio.create_task(receiver.get())
    right = asyncio.create_task(receiver.get(key="right"))
    left = asyncio.create_task(receiver.get(key="left"))
    await transport.settle()
    await sender.put("for left", key="left")
    assert await left == "for left"
    assert not plain.done()
    assert not right.done()
    await sender.put("for right", key="right")
    await sender.put("for anybody")
    assert (await right, await plain) == ("for right", "for anybody")


async def test_order_is_kept_for_each_key(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    for number in range(30):
        await sender.put(number, key=f"env {number % 3}")
    for env in (2, 0, 1):
        got = [await receiver.get(key=f"env {env}") for _ in range(10)]
        assert got == list(range(env, 30, 3))


async def test_a_number_and_its_text_are_two_keys(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(str, name="words"))
    await sender.put("number", key=1)
    await sender.put("text", key="1")
    assert await receiver.get(key="1") == "text"
    assert await receiver.get(key=1) == "number"


def keys_in_memory(channel: Channel[T]) -> list[str | int]:
    """The keys that the channel holds anything for."""
    return list(channel.queue.keys)


async def test_idle_keys_are_freed_after_gets_and_batches(transport: Transport) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    for number in range(10):
        await sender.put(number, key=f"get {number}")
        await sender.put(number, key=f"batch {number}")
        await receiver.get(key=f"get {number}")
        await receiver.get_batch(weight=1, key=f"batch {number}")
    await transport.settle()
    assert keys_in_memory(channel) == []


async def test_idle_keys_are_freed_after_waits_that_were_served(transport: Transport) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    waiting = asyncio.create_task(receiver.get(key="later"))
    await transport.settle()
    assert keys_in_memory(channel) == ["later"]
    await sender.put(1, key="later")
    assert await waiting == 1
    await transport.settle()
    assert keys_in_memory(channel) == []


async def test_idle_keys_are_freed_after_cancelled_waits(transport: Transport) -> None:
    channel = Channel(int, name="numbers", capacity=1)
    sender, receiver = await transport.ends(channel)
    await sender.put(1, key="full")
    tasks = [
        asyncio.create_task(sender.put(2, key="full")),
        asyncio.create_task(receiver.get(key="empty")),
        asyncio.create_task(receiver.get_batch(weight=2, key="batch")),
    ]
    await transport.settle()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await transport.settle()
    assert keys_in_memory(channel) == ["full"]
    assert await receiver.get(key="full") == 1
    await transport.settle()
    assert keys_in_memory(channel) == []


async def test_idle_keys_are_freed_after_leases(transport: Transport) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    await sender.put(1, key="env")
    async with receiver.lease(key="env") as batch:
        assert list(batch) == [1]
        await transport.settle()
        assert keys_in_memory(channel) == ["env"]  # the item may come back
    await transport.settle()
    assert keys_in_memory(channel) == []


async def test_a_key_that_is_freed_and_used_again_still_works(transport: Transport) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    for number in range(3):
        waiting = asyncio.create_task(receiver.get(key="env"))
        await transport.settle()
        await sender.put(number, key="env")
        assert await waiting == number


async def test_the_end_says_under_which_other_keys_items_are_left(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(str, name="actions"))
    await sender.put("for 0", key=0)
    await sender.put("for 0, too", key=0)
    await sender.put("for anybody")
    sender.close()
    found = r"nothing left under the key '0' \(but 1 without a key, 2 under 0\)"
    with pytest.raises(EndOfChannel, match=found):
        await receiver.get(key="0")
    assert [await receiver.get(key=0), await receiver.get(key=0)] == ["for 0", "for 0, too"]
    assert await receiver.get() == "for anybody"
    with pytest.raises(EndOfChannel, match=r"every sender closed, nothing left$"):
        await receiver.get()
