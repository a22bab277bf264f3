"""Bounded by default: in items and, if asked, in weight. Nothing is dropped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlinf_async.channels import Channel, ChannelFull, NoReceivers
from rlinf_async.channels.queue import statistics_of
from tests.channels.transport import Transport


async def test_a_put_waits_while_the_channel_is_full(transport: Transport) -> None:
    channel = Channel(int, name="numbers", capacity=2)
    sender, receiver = await transport.ends(channel)
    for number in range(2):
        await sender.put(number)
    third = asyncio.create_task(sender.put(2))
    await transport.settle()
    assert not third.done()
    assert statistics_of(channel.queue).depth == 2
    assert await receiver.get() == 0
    await third
    assert statistics_of(channel.queue).depth == 2


async def test_each_key_has_the_whole_capacity(transport: Transport) -> None:
    channel = Channel(int, name="numbers", capacity=1)
    sender, receiver = await transport.ends(channel)
    for key in ("left", "right", 3):
        await sender.put(0, key=key)
    full = asyncio.create_task(sender.put(1, key="left"))
    await transport.settle()
    assert not full.done()
    assert await receiver.get(key="right") == 0
    await transport.settle()
    assert not full.done()
    assert await receiver.get(key="left") == 0
    await full


async def test_weight_bounds_a_channel_too(transport: Transport) -> None:
    channel = Channel(str, name="words", capacity=8, max_weight=10)
    sender, receiver = await transport.ends(channel)
    await sender.put("six", weight=6)
    await sender.put("four", weight=4)
    one = asyncio.create_task(sender.put("one", weight=1))
    await transport.settle()
    assert not one.done()
    assert statistics_of(channel.queue).weight == 10
    assert await receiver.get() == "six"
    await one
    assert statistics_of(channel.queue).weight == 5


async def test_an_item_over_the_whole_weight_is_let_in_alone(transport: Transport) -> None:
    channel = Channel(str, name="words", capacity=8, max_weight=10)
    sender, receiver = await transport.ends(channel)
    await sender.put("light", weight=1)
    heavy = asyncio.create_task(sender.put("heavy", weight=1_000))
    await transport.settle()
    assert not heavy.done()
    assert await receiver.get() == "light"
    await heavy
    assert await receiver.get() == "heavy"


async def test_room_for_many_lets_many_waiting_puts_in(transport: Transport) -> None:
    channel = Channel(int, name="numbers", capacity=8, max_weight=8)
    sender, receiver = await transport.ends(channel)
    await sender.put(0, weight=8)
    tasks = [asyncio.create_task(sender.put(number, weight=2)) for number in range(1, 5)]
    await transport.settle()
    assert await receiver.get() == 0
    await asyncio.gather(*tasks)
    assert statistics_of(channel.queue).depth == 4


@pytest.mark.parametrize("weight", [0, -1])
async def test_an_item_without_weight_is_refused(transport: Transport, weight: int) -> None:
    channel = Channel(int, name="numbers")
    sender, _ = await transport.ends(channel)
    with pytest.raises(ValueError, match=rf"'numbers'.*at least 1, got weight={weight}"):
        await sender.put(1, weight=weight)
    assert statistics_of(channel.queue).puts == 0


def test_a_put_without_waiting_raises_when_there_is_no_room() -> None:
    channel = Channel(int, name="numbers", capacity=1)
    channel.sender.put_nowait(1)
    with pytest.raises(ChannelFull, match="'numbers' is full"):
        channel.sender.put_nowait(2)
    channel.sender.put_nowait(2, key="elsewhere")
    assert channel.receiver.get_nowait() == 1
    channel.sender.put_nowait(2)


def test_a_full_channel_that_nobody_reads_any_more_says_so_rather_than_full() -> None:
    channel = Channel(int, name="numbers", capacity=1)
    receiver = channel.receiver.open()
    channel.sender.put_nowait(1)
    receiver.close()
    with pytest.raises(NoReceivers):
        channel.sender.put_nowait(2)


@pytest.mark.parametrize("limit", ["capacity", "max_weight", "max_deliveries"])
def test_a_limit_below_one_is_refused_by_name(limit: str) -> None:
    zero: dict[str, Any] = {limit: 0}
    with pytest.raises(ValueError, match=rf"{limit} must be a whole number from 1, got 0"):
        Channel(int, name="numbers", **zero)
    wrong: Any = "3"
    with pytest.raises(ValueError, match=rf"{limit} must be a whole number from 1, got '3'"):
        Channel(int, name="numbers", **{limit: wrong})


def test_the_default_capacity_is_bounded() -> None:
    channel = Channel(int, name="numbers")
    for number in range(statistics_of(channel.queue).capacity):
        channel.sender.put_nowait(number)
    with pytest.raises(ChannelFull):
        channel.sender.put_nowait(-1)
