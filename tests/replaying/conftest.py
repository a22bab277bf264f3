"""Recorded runs that tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rlinf_async import Cluster, run
from rlinf_async.channels import Channel, ChannelError
from tests.replaying import workers
from tests.replaying.workers import Adder, Number

LIMIT = 100_000_000


@pytest.fixture(autouse=True)
def _as_recorded() -> Iterator[None]:
    """Workers do what they did, until a test says otherwise."""
    yield
    workers.drift, workers.surplus = 0.0, 0


async def drain(channel: Channel[Number], keys: list[int | None]) -> list[Number]:
    """Take everything under these keys, as long as the channel goes on."""
    found: list[Number] = []

    async def one(key: int | None) -> None:
        receiver = channel.receiver.clone()
        with receiver, suppress(ChannelError):
            while True:
                found.append(await receiver.get(key=key))

    await asyncio.gather(*(one(key) for key in keys))
    return found


async def add(cluster: Cluster, *, iterations: int = 10, each: int = 5) -> None:
    """A run of an `Adder` over so many iterations."""
    numbers = cluster.channel(Number, name="numbers")
    sums = cluster.channel(Number, name="sums")
    group = await cluster.launch(Adder, factor=2.0, name="Adder")
    call = group.call(Adder.run, numbers.receiver, sums.sender)
    draining = asyncio.create_task(drain(sums, list(range(iterations))))
    with numbers.sender as sender:
        for iteration in range(iterations):
            for at in range(each):
                await sender.put(Number(iteration + at / 8, iteration, at))
    await call
    await draining


async def record(folder: Path, *, kind: str = "local") -> None:
    """Record the run of an `Adder`."""
    async with getattr(Cluster, kind)() as cluster:
        cluster.record_into(folder / "recording" / "1", ["all"], LIMIT)
        await add(cluster)


@pytest.fixture(scope="session")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recorded run of an `Adder`, in this process."""
    folder = tmp_path_factory.mktemp("added")
    run(record(folder))
    return folder
