"""`Receiver.get_batch`: items by weight, oldest first."""

from __future__ import annotations

import asyncio

import pytest

from rlinf_async.channels import Channel, EndOfChannel
from tests.channels.transport import Transport


async def test_a_batch_waits_until_its_weight_is_reached(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(str, name="words"))
    batch = asyncio.create_task(receiver.get_batch(weight=5))
    for word in ("aa", "bb"):
        await sender.put(word, weight=2)
        await transport.settle()
        assert not batch.done()
    await sender.put("c", weight=1)
    assert await batch == ["aa", "bb", "c"]


async def test_a_batch_never_exceeds_its_weight(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(str, name="words"))
    for word in ("aaa", "bbb", "c"):
        await sender.put(word, weight=len(word))
    assert await receiver.get_batch(weight=5) == ["aaa"]
    assert await receiver.get_batch(weight=4) == ["bbb", "c"]


async def test_an_item_heavier_than_the_batch_comes_alone(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(str, name="words"))
    await sender.put("light", weight=1)
    await sender.put("heavy", weight=100)
    await sender.put("light again", weight=1)
    assert await receiver.get_batch(weight=3) == ["light"]
    assert await receiver.get_batch(weight=3) == ["heavy"]


async def test_a_batch_may_be_heavier_than_the_channel_holds(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers", capacity=2))
    batch = asyncio.create_task(receiver.get_batch(weight=10))
    for number in range(10):
        await sender.put(number)
    assert await batch == list(range(10))


async def test_at_least_one_waits_for_the_first_and_takes_what_is_ready(
    transport: Transport,
) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    first = asyncio.create_task(receiver.get_batch(weight=4, at_least=1))
    await transport.settle()
    assert not first.done()
    await sender.put(0)
    assert await first == [0]
    for number in range(1, 7):
        await sender.put(number)
    assert await receiver.get_batch(weight=4, at_least=1) == [1, 2, 3, 4]
    assert await receiver.get_batch(weight=4, at_least=1) == [5, 6]


async def test_what_waits_for_room_is_ready_too(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers", capacity=2))
    puts = [asyncio.create_task(sender.put(number)) for number in range(6)]
    await transport.settle()
    batch = await receiver.get_batch(weight=5, at_least=1)
    assert sorted([*batch, await receiver.get()]) == [0, 1, 2, 3, 4, 5]
    assert len(batch) == 5
    await asyncio.gather(*puts)


async def test_at_least_more_than_is_ready_waits(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await sender.put(0)
    batch = asyncio.create_task(receiver.get_batch(weight=4, at_least=2))
    await transport.settle()
    assert not batch.done()
    await sender.put(1)
    assert await batch == [0, 1]


async def test_at_the_end_what_is_left_is_delivered_however_little(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    batch = asyncio.create_task(receiver.get_batch(weight=10))
    await transport.settle()
    await sender.put(1)
    sender.close()
    assert await batch == [1]
    with pytest.raises(EndOfChannel, match="'numbers' has ended"):
        await receiver.get_batch(weight=10)


async def test_a_batch_takes_only_its_own_key(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    for number in range(6):
        await sender.put(number, key=number % 2)
    assert await receiver.get_batch(weight=3, key=1) == [1, 3, 5]
    assert await receiver.get_batch(weight=3, key=0) == [0, 2, 4]


@pytest.mark.parametrize(("weight", "at_least"), [(0, None), (-1, None), (3, 0), (3, 4)])
async def test_an_impossible_batch_is_refused_with_its_numbers(
    transport: Transport, weight: int, at_least: int | None
) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    with pytest.raises(ValueError, match=rf"'numbers'.*weight={weight}, at_least={at_least}"):
        await receiver.get_batch(weight=weight, at_least=at_least)
    await sender.put(1)
    assert await receiver.get() == 1  # the refused batch is not in anybody's way
