"""The workers of a cluster open a `Direct` by themselves, as a setting says."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire.direct import DIRECT_VARIABLE
from tests.channels.wire.memory_worker import SIZE, Numbered, check

ITEMS = 12


class Side(ra.Worker):
    """Puts large items, or gets them."""

    async def put(self, items: ra.Sender[Numbered]) -> None:
        for number in range(ITEMS):
            await items.put(Numbered(number, np.full(4 * SIZE, number, np.int64)))

    async def get(self, items: ra.Receiver[Numbered]) -> list[int]:
        found = [item async for item in items]
        for item in found:
            check(item)
        return [item.number for item in found]


@pytest.mark.parametrize(("use", "direct"), [("always", ITEMS), ("auto", 0)])
async def test_large_items_go_from_worker_to_worker_where_it_is_set_so(
    use: str, direct: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECT_VARIABLE, use)
    async with ra.Cluster.process() as cluster:
        sides = await cluster.launch(Side, count=2)
        items = cluster.channel(Numbered, name="items", capacity=4)
        _, found = await asyncio.gather(
            sides[0].call(Side.put, items.sender), sides[1].call(Side.get, items.receiver)
        )
        assert found == [*range(ITEMS)]
        statistics = statistics_of(items.queue)
        assert (statistics.direct, statistics.loaded, statistics.lost) == (direct, 0, 0)


async def test_a_setting_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECT_VARIABLE, "sometimes")
    with pytest.raises(ra.WorkerError, match="write auto, always or never"):
        async with ra.Cluster.process() as cluster:
            await cluster.launch(Side)
