"""Recordings of clusters: of what passes between processes, whichever way it takes."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import rlinf_async as ra
from rlinf_async.channels.wire.direct import DIRECT_VARIABLE
from rlinf_async.recording import Delivered, Put, Recording, Settled, read_recording
from rlinf_async.runtime.recording import NoSuchChannel
from rlinf_async.workers.base import BuildError

LIMIT = 100_000_000
SMALL, LARGE = 8, 300_000


class Item(msgspec.Struct):
    """An item whose arrays stay in its message, or go by shared memory."""

    number: int
    values: NDArray[np.float32]


class Side(ra.Worker):
    """Puts and gets."""

    async def put(self, items: ra.Sender[Item], count: int, size: int, key: int) -> None:
        for number in range(count):
            await items.put(Item(number, np.full(size, number, np.float32)), key=key)

    async def get(self, items: ra.Receiver[Item], key: int, count: int) -> list[int]:
        return [(await items.get(key=key)).number for _ in range(count)]

    async def lease(self, items: ra.Receiver[Item], key: int, count: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            try:
                async with items.lease(key=key) as lease:
                    [item] = lease
                    if item.number == 2 and lease.deliveries == [1]:
                        raise ValueError("once more")
                    taken.append(item.number)
            except ValueError:
                continue
        return taken


def numbers_taken(recording: Recording, channel: str, key: int) -> list[int]:
    """The numbers of the items, in the order in which they were taken."""
    at = {one.sequence: one.value.number for one in recording.items(channel)}
    kinds = (Delivered, Settled)
    taken: list[int] = []
    keys = {
        sequence: put.key
        for put in recording.events(Put, channel=channel)
        for sequence in range(put.sequence, put.sequence + len(put.bodies))
    }
    for one in recording.events(channel=channel):
        if isinstance(one, kinds) and (
            one.taken if isinstance(one, Delivered) else one.outcome == "taken"
        ):
            taken += [at[number] for number in one.sequences if keys[number] == key]
    return taken


async def graph(cluster: ra.Cluster, count: int, size: int) -> list[list[int]]:
    """Two workers put, two get: one by leases."""
    items = cluster.channel(Item, name="items", capacity=32)
    cluster.latest(int, name="newest")
    sides = await cluster.launch(Side, count=4)
    putting = [sides[key].call(Side.put, items.sender, count, size, key) for key in (0, 1)]
    getting = sides[2].call(Side.get, items.receiver, 0, count)
    leasing = sides[3].call(Side.lease, items.receiver, 1, count)
    await asyncio.gather(*putting)
    got = await asyncio.gather(getting, leasing)
    return list(got)


@pytest.mark.parametrize(("count", "size", "direct"), [
    (400, SMALL, "auto"), (12, LARGE, "auto"), (12, LARGE, "always"),
])  # fmt: skip
async def test_all_that_passed_between_processes_is_recorded_as_it_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, size: int, direct: str
) -> None:
    monkeypatch.setenv(DIRECT_VARIABLE, direct)
    async with ra.Cluster.process() as cluster:
        cluster.record_into(tmp_path / "1", ["all"], LIMIT)
        got = await graph(cluster, count, size)
        assert cluster.recorder is not None
        assert cluster.recorder.channels == ["items", "newest"]
    recording = read_recording(tmp_path)
    assert (recording.damaged, recording.torn, recording.dropped) == ([], 0, None)
    items = list(recording.items("items"))
    assert [one.sequence for one in items] == list(range(1, 2 * count + 1))
    assert Counter((one.key, one.sender.partition(".")[0]) for one in items) == {
        (0, "Side[0]"): count, (1, "Side[1]"): count,
    }  # fmt: skip
    assert all(np.all(one.value.values == one.value.number) for one in items)
    assert all(len(one.value.values) == size for one in items)
    assert [numbers_taken(recording, "items", key) for key in (0, 1)] == got
    receivers = {(one.key, one.receiver.partition(".")[0]) for one in recording.events(Delivered)}
    assert receivers == {(0, "Side[2]"), (1, "Side[3]")}
    [failed] = [one for one in recording.events(Settled) if one.outcome == "failed"]
    assert failed.error.endswith("once more")


async def test_a_channel_that_is_not_there_is_named_before_a_worker_starts(
    tmp_path: Path,
) -> None:
    async with ra.Cluster.local() as cluster:
        cluster.record_into(tmp_path / "1", ["items", "nosuch"], LIMIT)
        with pytest.raises(NoSuchChannel, match="no channel 'nosuch' to record: this run has item"):
            await graph(cluster, 1, 1)
        assert cluster.groups == {}


async def test_a_channel_that_lives_with_a_worker_cannot_be_recorded(tmp_path: Path) -> None:
    async with ra.Cluster.process() as cluster:
        cluster.record_into(tmp_path / "1", ["all"], LIMIT)
        [side] = await cluster.launch(Side)
        near = await cluster.channel_at(side, int, name="near")
        with pytest.raises(BuildError, match="lives with a worker"):
            cluster.record(near)  # type: ignore[arg-type]
        assert cluster.recorder is not None
        assert cluster.recorder.channels == []
        cluster.record_into(tmp_path / "1", ["far"], LIMIT)
        with pytest.raises(NoSuchChannel, match=r"channel 'far' lives with Side\[0\]"):
            await cluster.channel_at(side, int, name="far")


async def test_a_script_records_a_channel_from_when_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for start in (1, 2):
        async with ra.Cluster.local() as cluster:
            channel = cluster.channel(int, name="numbers")
            await channel.sender.put(1)
            await channel.receiver.get()
            cluster.record(channel)
            await channel.sender.put(start)
        assert [one.value for one in read_recording("recording").items("numbers")] == [start]
