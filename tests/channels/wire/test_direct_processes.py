"""Large arrays between real processes, past the owner, and what is left when one is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from rlinf_async.channels import Channel, EndOfChannel
from rlinf_async.channels.queue import statistics_of
from tests.channels.wire import direct_worker
from tests.channels.wire.harness import Wired, until, wired
from tests.channels.wire.memory_worker import SIZE, Numbered, check
from tests.channels.wire.running import running

BYTES = 8 * SIZE


@asynccontextmanager
async def worker(owner: Wired, end: Any, what: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that does this with an end like this one; dead when the block ends."""
    ref = owner.channels.end_ref(end, "w")
    text = msgspec.json.encode(ref).decode()
    try:
        async with running(direct_worker, owner.server.address, text, what) as process:
            yield process
    finally:
        owner.channels.release(ref.number)


def over_tcp(patience: float = 0.5) -> Any:
    return wired(address="tcp://127.0.0.1:0", patience=patience)


def arrays(capacity: int = 8) -> Channel[Numbered]:
    return Channel(Numbered, name="arrays", capacity=capacity)


async def test_three_processes_and_no_array_passes_the_owner() -> None:
    channel = arrays()
    async with (
        over_tcp() as owner,
        worker(owner, channel.receiver, "all") as consumer,
        worker(owner, channel.sender, "50 and stay") as producer,
    ):
        seen = list[Any]()
        owner.server._on_disconnect = lambda connection, _: seen.append(connection)
        await until(lambda: statistics_of(channel.queue).gets == 50)
        channel.close()
        assert await consumer.wait() == 0
        producer.terminate()
        await until(lambda: len(seen) == 2)
        statistics = statistics_of(channel.queue)
        assert (statistics.direct, statistics.loaded, statistics.lost) == (50, 0, 0)
        put, taken = statistics.edges
        assert (put.items, put.direct, taken.items, taken.direct) == (50, 50, 50, 50)
        assert put.nbytes == taken.nbytes > 50 * BYTES
        assert sum(one.received_bytes + one.sent_bytes for one in seen) < BYTES


async def test_a_killed_producer_takes_along_what_nobody_had_fetched_and_that_is_counted() -> None:
    channel = arrays()
    async with over_tcp() as owner, worker(owner, channel.sender, "5 and stay") as producer:
        await until(lambda: statistics_of(channel.queue).depth == 5)
        async with worker(owner, channel.sender, "1 and stay"):
            await until(lambda: statistics_of(channel.queue).depth == 6)
            producer.kill()
            async with worker(owner, channel.receiver, "all") as consumer:
                channel.close()
                assert await consumer.wait() == 0
        statistics = statistics_of(channel.queue)
        assert statistics.lost == 5
        assert (statistics.puts, statistics.gets, statistics.depth) == (6, 1, 0)


async def test_a_producer_that_ends_in_order_leaves_nothing_behind_and_loses_nothing() -> None:
    channel = arrays()
    async with over_tcp() as owner:
        async with worker(owner, channel.sender, "5") as producer:
            assert await producer.wait() == 0
        statistics = statistics_of(channel.queue)
        assert (statistics.depth, statistics.loaded, statistics.lost) == (5, 5, 0)
        found = [await channel.receiver.get() for _ in range(5)]
        for number, one in enumerate(found):
            check(one)
            assert one.number == number
        with pytest.raises(EndOfChannel):
            await channel.receiver.get()


@pytest.mark.parametrize("when", ["hold", "fetch"])
async def test_a_consumer_that_is_killed_leaves_its_items_to_the_next(when: str) -> None:
    channel = arrays()
    async with over_tcp() as owner, worker(owner, channel.sender, "4 and stay"):
        async with worker(owner, channel.receiver, when) as consumer:
            assert await consumer.wait() == -signal.SIGKILL
            await owner.lost.get()
        async with channel.receiver.lease(weight=4) as batch:
            for one in batch:
                check(one)
            assert [one.number for one in batch] == [0, 1, 2, 3]
            assert batch.deliveries == [2, 2, 1, 1]
        assert statistics_of(channel.queue).lost == 0
