"""An owner and a worker with a bad network between them, and what they say to each other."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rlinf_async.channels import Channel
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import Connection, Router, connect
from rlinf_async.channels.wire.session.endpoint import Timeouts
from tests.channels.wire.harness import PATIENCE, SECRET, Wired, until, wired
from tests.net.cutter import Cut, Cutter, Way, cutter


class Item(msgspec.Struct):
    """Small, middling or large."""

    number: int
    values: NDArray[np.float32]


SIZES = [0, 3, 5_000, 40_000, 200_000]


class Far(NamedTuple):
    """An owner and a worker with a bad network between them."""

    owner: Wired
    net: Cutter
    connection: Connection


@asynccontextmanager
async def far(*cuts: Cut, tcp: bool = False, patience: float = PATIENCE) -> AsyncIterator[Far]:
    """Both in this loop, over sockets that are cut as planned. A machine may keep them waiting."""
    times: Timeouts = {"patience": PATIENCE, "handshake_timeout": PATIENCE}
    async with wired(address="tcp://127.0.0.1:0" if tcp else None, **times) as owner:
        with tempfile.TemporaryDirectory(prefix="net-") as folder:
            async with cutter(owner.server.address, None if tcp else Path(folder), *cuts) as net:
                times["patience"] = patience
                connection = await connect(
                    net.address, SECRET, name="worker", router=Router(), **times
                )
                yield Far(owner, net, connection)
                connection.close()
                await connection.wait_closed()


async def small_talk(far: Far, count: int = 3) -> None:
    """Every kind of thing that is said: puts, gets, a lease that fails, one that does not."""
    channel = Channel(int, name="numbers", capacity=2)
    sender = far.owner.sender(channel, far.connection)
    receiver = far.owner.receiver(channel, far.connection)

    async def put() -> None:
        for number in range(count):
            await sender.put(number)
        sender.close()

    async def get() -> list[int]:
        with pytest.raises(LookupError):
            async with receiver.lease():
                raise LookupError
        async with receiver.lease() as batch:
            found = [*batch]
        return found + [number async for number in receiver]

    async with asyncio.TaskGroup() as group:
        group.create_task(put())
        got = group.create_task(get())
    assert got.result() == list(range(count))
    seen = statistics_of(channel.queue)
    assert (seen.puts, seen.leases_out, seen.depth, seen.redelivered) == (count, 0, 0, 1)


async def arrays_both_ways(far: Far, count: int) -> None:
    """Arrays of all sizes go to the owner and back."""
    channel = Channel(Item, name="items", capacity=4)
    sender = far.owner.sender(channel, far.connection)
    receiver = far.owner.receiver(channel, far.connection)

    async def put() -> None:
        for number in range(count):
            values = np.full(SIZES[number % len(SIZES)], number, np.float32)
            await sender.put(Item(number, values))
        sender.close()

    async def get() -> list[int]:
        found = []
        async for item in receiver:
            assert len(item.values) == SIZES[item.number % len(SIZES)]
            assert (item.values == item.number).all()
            found.append(item.number)
        return found

    async with asyncio.TaskGroup() as group:
        group.create_task(put())
        got = group.create_task(get())
    assert got.result() == list(range(count))
    assert (statistics_of(channel.queue).puts, statistics_of(channel.queue).gets) == (count, count)


async def said(tcp: bool) -> tuple[dict[Way, int], dict[Way, int]]:
    """Bytes of a handshake, and of it with the small talk, in both directions."""
    async with far(tcp=tcp) as one:
        await until(lambda: one.owner.server.connections)
        hello = dict(one.net.passed[0])
        await small_talk(one)
        return hello, dict(one.net.passed[0])
