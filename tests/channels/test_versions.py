"""`Receiver.get_within_lag`: too-stale items come back as a typed outcome and are counted."""

from __future__ import annotations

import msgspec
import pytest

from rlinf_async.channels import Channel, Fresh, TooStale
from rlinf_async.channels.ends import oldest_version
from rlinf_async.channels.queue import statistics_of
from tests.channels.transport import Transport


class Sample(msgspec.Struct, frozen=True):
    """An item whose parts were made by these weight versions."""

    version: int | list[int]


async def test_an_item_within_the_lag_is_fresh(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(Sample, name="samples"))
    await sender.put(Sample(5))
    got = await receiver.get_within_lag(current=7, max_lag=2)
    assert got == Fresh(Sample(5), lag=2)


async def test_an_item_past_the_lag_is_too_stale_and_counted(transport: Transport) -> None:
    channel = Channel(Sample, name="samples")
    sender, receiver = await transport.ends(channel)
    await sender.put(Sample(4))
    await sender.put(Sample(7), key="env")
    assert await receiver.get_within_lag(current=7, max_lag=2) == TooStale(Sample(4), lag=3)
    fresh = await receiver.get_within_lag(current=7, max_lag=0, key="env")
    assert fresh == Fresh(Sample(7), lag=0)
    await transport.settle()
    assert statistics_of(channel.queue).stale == 1


async def test_the_oldest_part_of_an_item_counts(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(Sample, name="samples"))
    await sender.put(Sample([7, 3, 6]))
    assert isinstance(await receiver.get_within_lag(current=7, max_lag=3), TooStale)


async def test_an_item_without_a_version_is_refused_by_name() -> None:
    channel = Channel(int, name="numbers")
    channel.sender.put_nowait(1)
    with pytest.raises(TypeError, match="int carries no 'version'"):
        await channel.receiver.get_within_lag(current=1, max_lag=0)


def test_versions_may_be_an_array() -> None:
    np = pytest.importorskip("numpy")

    class Holder:
        version = np.array([4, 2, 3])

    class Single:
        version = np.int64(6)

    assert (oldest_version(Holder()), oldest_version(Single())) == (2, 6)
