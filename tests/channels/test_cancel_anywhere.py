"""A cancellation that comes 0, 1, 2, ... turns of the loop later: at every await point."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from rlinf_async.channels import Channel, Receiver
from rlinf_async.channels.queue import statistics_of
from rlinf_async.testing import nothing_left_waiting
from tests.channels.transport import Transport

T = TypeVar("T")

TURNS = range(14)
"""A request and its reply over a socket take fewer turns than this."""

pytestmark = pytest.mark.parametrize("turns", TURNS)


async def cancel_after(turns: int, work: Coroutine[Any, Any, T]) -> T | None:
    """Run something, cancel it after this many turns; its result if it was faster."""
    task = asyncio.create_task(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    [result] = await asyncio.gather(task, return_exceptions=True)
    if isinstance(result, asyncio.CancelledError):
        return None
    if isinstance(result, BaseException):
        raise result
    return result


async def test_a_get_takes_its_item_or_leaves_it(transport: Transport, turns: int) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    putting = asyncio.create_task(sender.put(1))
    got = await cancel_after(turns, receiver.get())
    await putting
    assert got == 1 or await receiver.get() == 1
    await transport.settle()
    assert (statistics_of(channel.queue).gets, statistics_of(channel.queue).depth) == (1, 0)
    nothing_left_waiting(channel)


async def test_a_batch_takes_its_items_or_leaves_them_in_order(
    transport: Transport, turns: int
) -> None:
    channel = Channel(int, name="numbers", capacity=2)
    sender, receiver = await transport.ends(channel)

    async def produce() -> None:
        for number in range(3):
            await sender.put(number)

    putting = asyncio.create_task(produce())
    got = await cancel_after(turns, receiver.get_batch(weight=3))
    assert got == [0, 1, 2] or await receiver.get_batch(weight=3) == [0, 1, 2]
    await putting
    await transport.settle()
    nothing_left_waiting(channel)


async def test_a_put_leaves_its_item_once_or_not_at_all(transport: Transport, turns: int) -> None:
    channel = Channel(int, name="numbers", capacity=1)
    sender, receiver = await transport.ends(channel)
    await sender.put(0)
    getting = asyncio.create_task(receiver.get())
    await cancel_after(turns, sender.put(1))
    assert await getting == 0
    sender.close()
    rest = [number async for number in receiver]
    assert rest in ([1], [])
    await transport.settle()
    assert statistics_of(channel.queue).puts == 1 + len(rest)
    nothing_left_waiting(channel)


async def test_a_lease_consumes_its_item_or_puts_it_back(transport: Transport, turns: int) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    consumed: list[int] = []

    async def consume(receiver: Receiver[int]) -> None:
        async with receiver.lease() as batch:
            await asyncio.sleep(0)
            consumed.extend(batch)

    putting = asyncio.create_task(sender.put(1))
    await cancel_after(turns, consume(receiver))
    await putting
    await transport.settle()
    assert statistics_of(channel.queue).leases_out == 0
    assert statistics_of(channel.queue).depth == 1 - len(consumed)
    if not consumed:
        await consume(receiver)
    assert consumed == [1]
    await transport.settle()
    nothing_left_waiting(channel)
