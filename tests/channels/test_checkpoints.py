"""A put or get that need not wait lets others run, one time in 128."""

from __future__ import annotations

import asyncio

import pytest

from rlinf_async.channels import Channel
from rlinf_async.channels.queue import statistics_of
from tests.channels.transport import Transport


async def test_a_loop_over_puts_and_gets_that_never_wait_can_be_cancelled(
    transport: Transport,
) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))

    async def forever() -> None:
        while True:
            await sender.put(1)
            await receiver.get()

    task = asyncio.create_task(forever())
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_loop_over_puts_and_gets_does_not_starve_others() -> None:
    channel = Channel(int, name="numbers")
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(other())
    for number in range(1280):
        await channel.sender.put(number)
        await channel.receiver.get()
    assert turns >= 10
    beside.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beside


async def test_a_put_or_get_that_is_cancelled_at_its_checkpoint_does_nothing() -> None:
    channel = Channel(int, name="numbers", capacity=1000)
    for number in range(127):
        channel.sender.put_nowait(number)
    putting = asyncio.create_task(channel.sender.put(127))
    await asyncio.sleep(0)  # it has begun, and lets others run
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert statistics_of(channel.queue).depth == 127
    for number in range(127):
        assert channel.receiver.get_nowait() == number
    channel.sender.put_nowait(128)
    getting = asyncio.create_task(channel.receiver.get())
    await asyncio.sleep(0)
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    assert await channel.receiver.get() == 128
