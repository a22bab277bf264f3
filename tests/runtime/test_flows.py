"""What a run shows of its channels: rates, edges, connections."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import rlinf_async as ra
from rlinf_async.runtime.jobs import view
from rlinf_async.runtime.jobs.view import ChannelRates


class Maker(ra.Worker):
    """Makes arrays until it has made enough."""

    async def make(self, out: ra.Sender[NDArray[np.uint8]], count: int) -> None:
        for _ in range(count):
            await out.put(np.zeros(100_000, np.uint8))


async def test_edges_and_connections_of_processes_are_seen_and_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(view, "RATES_EVERY_NS", 0)
    async with ra.Cluster.process() as cluster:
        arrays = cluster.channel(NDArray[np.uint8], name="arrays", capacity=4)
        makers = await cluster.launch(Maker)
        shown = ChannelRates(cluster)
        shown.look()
        making = makers.call(Maker.make, arrays.sender, 20)
        for _ in range(20):
            await arrays.receiver.get()
        await making
        shown.look()
        [channel] = shown.channels
        assert channel.items_per_second is not None
        assert channel.items_per_second > 0
        [edge] = shown.edges
        assert edge.name == "Maker[0] -> arrays"
        assert edge.shared + edge.copied == 20
        assert edge.shared > 10
        assert edge.bytes_per_second > 0
        [traffic] = cluster.traffic()
        assert traffic.received_shared == edge.shared
    tracks = {one.track for one in shown.counters}
    assert tracks == {"channel arrays", "Maker[0] -> arrays", f"connection {traffic.peer}"}


async def test_a_second_look_right_after_the_first_is_not_taken() -> None:
    async with ra.Cluster.local() as cluster:
        cluster.channel(int, name="numbers")
        shown = ChannelRates(cluster)
        shown.look()
        shown.look()
        assert len(shown.counters) == 1
        assert cluster.traffic() == []
