"""`statistics()`: exact, in the loop's time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rlinf_async.channels import Channel, Statistics, current_party
from rlinf_async.channels.queue import statistics_of
from rlinf_async.testing import run
from tests.channels.transport import Transport

SEEDS = range(20)

Scenario = Callable[[], Coroutine[Any, Any, Statistics]]


async def waiting_puts_and_gets() -> Statistics:
    """A put that waits 2 s for room, a get that waits 3 s for an item, 10 s of life."""
    channel = Channel(int, name="numbers", capacity=1)
    await channel.sender.put(0)
    channel.receiver.open()
    waiting_put = asyncio.create_task(channel.sender.put(1))
    await asyncio.sleep(2)
    await channel.receiver.get()
    await waiting_put
    await channel.receiver.get()
    waiting_get = asyncio.create_task(channel.receiver.get())
    await asyncio.sleep(3)
    await channel.sender.put(2, weight=7)
    await waiting_get
    await asyncio.sleep(5)
    await channel.sender.put(3, weight=4)
    await channel.sender.put(4, key="env", weight=6)
    return statistics_of(channel.queue)


@pytest.mark.parametrize("seed", SEEDS)
def test_counts_and_times_are_exact(seed: int) -> None:
    seen = run(waiting_puts_and_gets(), seed=seed)
    assert seen == Statistics(
        name="numbers",
        capacity=1,
        depth=2,
        weight=10,
        keys=1,
        puts=5,
        gets=3,
        put_waits=1,
        put_wait_seconds=2.0,
        get_waits=1,
        get_wait_seconds=3.0,
        waiting_putters=0,
        waiting_getters=0,
        leases_out=0,
        redelivered=0,
        dead_letters=0,
        stale=0,
        senders=1,
        receivers=1,
        seconds=10.0,
    )
    assert seen.rate == pytest.approx(0.3)


async def waits_that_ended_badly() -> Statistics:
    """A cancelled get (1 s), a cancelled put (2 s), then a failure of both (4 s)."""
    channel = Channel(int, name="numbers", capacity=1)
    await channel.sender.put(0)
    doomed: list[asyncio.Task[object]] = [
        asyncio.create_task(channel.receiver.get(key="env")),
        asyncio.create_task(channel.sender.put(1)),
        asyncio.create_task(channel.receiver.get(key="env")),
        asyncio.create_task(channel.sender.put(2)),
    ]
    await asyncio.sleep(1)
    doomed[0].cancel()
    await asyncio.sleep(1)
    doomed[1].cancel()
    await asyncio.sleep(2)
    channel.fail("broken")
    await asyncio.gather(*doomed, return_exceptions=True)
    return statistics_of(channel.queue)


@pytest.mark.parametrize("seed", SEEDS)
def test_waits_that_were_cancelled_or_failed_count_their_time(seed: int) -> None:
    seen = run(waits_that_ended_badly(), seed=seed)
    assert (seen.puts, seen.gets) == (1, 0)
    assert (seen.put_waits, seen.put_wait_seconds) == (2, 2.0 + 4.0)
    assert (seen.get_waits, seen.get_wait_seconds) == (2, 1.0 + 4.0)
    assert (seen.waiting_putters, seen.waiting_getters) == (0, 0)


async def test_leases_are_counted_in_items(transport: Transport) -> None:
    channel = Channel(int, name="numbers", max_deliveries=1)
    sender, receiver = await transport.ends(channel)
    for number in range(4):
        await sender.put(number)
    with pytest.raises(RuntimeError, match="broken"):
        await fail_inside_a_lease(channel, receiver.lease(weight=3))
    await transport.settle()
    seen = await receiver.statistics()
    assert (seen.leases_out, seen.dead_letters, seen.redelivered, seen.depth) == (0, 3, 0, 1)


async def fail_inside_a_lease(channel: Channel[int], lease: Any) -> None:
    async with lease:
        assert statistics_of(channel.queue).leases_out == 3
        raise RuntimeError("broken")


async def test_both_ends_give_the_channels_statistics(transport: Transport) -> None:
    channel = Channel(int, name="numbers", capacity=5)
    sender, receiver = await transport.ends(channel)
    await sender.put(1, weight=3)
    for end in (sender, receiver):
        seen = await end.statistics()
        assert (seen.name, seen.capacity, seen.depth, seen.weight) == ("numbers", 5, 1, 3)


def test_a_channel_made_before_its_loop_counts_its_age_from_its_first_end() -> None:
    channel = Channel(int, name="numbers")
    assert statistics_of(channel.queue).seconds == 0
    assert statistics_of(channel.queue).rate == 0

    async def main() -> float:
        await asyncio.sleep(5)
        current_party.set("main")
        channel.sender.put_nowait(1)
        await asyncio.sleep(2)
        return statistics_of(channel.queue).seconds

    assert run(main()) == 2.0
