"""What a recording holds of what passed channels, in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rlinf_async.channels import Channel, Latest
from rlinf_async.channels.wire.codec import ItemCodec
from rlinf_async.recording import (
    ChannelEnded,
    Declared,
    Delivered,
    Event,
    NotRecorded,
    Published,
    Put,
    Recorder,
    RecordingError,
    Replaced,
    Seen,
    Settled,
    TypeChanged,
    TypeGone,
    Withdrawn,
    read_recording,
)


class Item(msgspec.Struct):
    """An item with an array."""

    number: int
    values: NDArray[np.float32]
    version: int = 0


class Left(msgspec.Struct):
    """A message that msgspec cannot tell from the other."""

    number: int


class Right(msgspec.Struct):
    """The other."""

    number: int


def item(number: int, size: int = 8) -> Item:
    return Item(number, np.full(size, number, np.float32), version=number // 2)


def said(events: list[Event], *kinds: type[Event]) -> list[Event]:
    return [one for one in events if isinstance(one, kinds)]


async def test_items_are_recorded_in_order_with_key_weight_sender_and_both_clocks(
    tmp_path: Path,
) -> None:
    channel = Channel(Item, name="items")
    recorder = Recorder(tmp_path / "1")
    recorder.record(channel)
    clock = asyncio.get_running_loop().time
    before = clock()
    for number in range(1, 5):
        await channel.sender.put(item(number, 40_000), key=number % 2, weight=number)
    recorder.close()

    found = list(read_recording(tmp_path).items("items"))
    assert [one.sequence for one in found] == [1, 2, 3, 4]
    assert [one.key for one in found] == [1, 0, 1, 0]
    assert [one.weight for one in found] == [1, 2, 3, 4]
    assert [one.version for one in found] == [0, 1, 1, 2]
    assert {one.sender for one in found} == {"main"}
    assert all(np.array_equal(one.value.values, item(one.sequence, 40_000).values) for one in found)
    times = [before - 1e-6, *(one.monotonic for one in found), clock() + 1e-6]
    assert times == sorted(times)
    assert [one.wall for one in found] == sorted(one.wall for one in found)


async def test_an_item_is_recorded_as_it_was_put_whatever_its_receiver_does_to_it(
    tmp_path: Path,
) -> None:
    channel = Channel(Item, name="items")
    recorder = Recorder(tmp_path / "1")
    recorder.record(channel)
    await channel.sender.put(item(7, 40_000))
    got = await channel.receiver.get()
    got.values[:] = -1
    recorder.close()
    [found] = read_recording(tmp_path).items("items")
    assert np.all(found.value.values == 7)


async def test_deliveries_say_who_got_what_and_what_became_of_it(tmp_path: Path) -> None:
    channel = Channel(int, name="numbers", max_deliveries=3)
    recorder = Recorder(tmp_path / "1")
    recorder.record(channel)
    for number in range(10):
        await channel.sender.put(number)
    assert await channel.receiver.get() == 0
    assert await channel.receiver.get_batch(weight=2) == [1, 2]
    async with channel.receiver.lease():
        pass
    with pytest.raises(ZeroDivisionError):
        async with channel.receiver.lease(weight=2):
            raise ZeroDivisionError("no")
    assert channel.receiver.get_nowait() == 4
    channel.close()
    recorder.close()

    events: list[Event] = list(read_recording(tmp_path).events())
    told: list[tuple[Any, ...]] = []
    for one in events:
        if isinstance(one, Delivered):
            told.append(("delivered", one.sequences, one.lease, one.weight, one.taken))
        if isinstance(one, Settled):
            told.append((one.outcome, one.sequences, one.error))
    assert told == [
        ("delivered", [1], False, 1, True),
        ("delivered", [2, 3], False, 2, False),
        ("taken", [2, 3], ""),
        ("delivered", [4], True, 1, False),
        ("taken", [4], ""),
        ("delivered", [5, 6], True, 2, False),
        ("failed", [5, 6], "ZeroDivisionError: no"),
        ("delivered", [5], False, 1, True),
    ]
    assert said(events, ChannelEnded) == events[-1:]
    assert [one.number for one in events] == list(range(1, len(events) + 1))


async def test_puts_of_one_turn_are_one_event_and_every_order_stays(tmp_path: Path) -> None:
    first, second = Channel(int, name="first"), Channel(int, name="second")
    recorder = Recorder(tmp_path / "1")
    recorder.record(first)
    recorder.record(second)
    for number in range(20):
        await first.sender.put(number)
    await second.sender.put(100)
    await first.sender.put(20)
    recorder.close()
    recording = read_recording(tmp_path)
    puts = [(one.channel, one.sequence, len(one.bodies)) for one in recording.events(Put)]
    assert puts == [("first", 1, 20), ("second", 1, 1), ("first", 21, 1)]
    assert [one.value for one in recording.items("first")] == list(range(21))


@pytest.mark.parametrize(("size", "sent_as_recorded"), [(8, False), (400, True), (40_000, False)])
async def test_what_was_encoded_for_the_recording_is_not_encoded_again_to_be_sent(
    size: int, sent_as_recorded: bool, tmp_path: Path
) -> None:
    channel = Channel(Item, name="items", capacity=8)
    codec = ItemCodec(Item)
    channel.queue.encode = codec.encode  # another process has an end
    recorder = Recorder(tmp_path / "1")
    recorder.record(channel)
    with channel.sender as sender, channel.receiver as receiver:
        await sender.put(item(1, size))
        [entry] = channel.queue.of_key(None).entries
        assert (entry.ready is not None) == sent_as_recorded
        if sent_as_recorded:
            assert entry.ready.data == codec.encode(entry.item).data
        assert (await receiver.get()) is entry.item
    recorder.close()


async def test_a_cancelled_put_that_had_come_in_is_said_to_be_withdrawn(tmp_path: Path) -> None:
    channel = Channel(int, name="numbers", capacity=1)
    recorder = Recorder(tmp_path / "1")
    recorder.record(channel)
    await channel.sender.put(1)
    waiting = asyncio.ensure_future(channel.sender.put(2))
    await asyncio.sleep(0)
    assert channel.receiver.get_nowait() == 1  # 2 comes in, and its task has not run
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    recorder.close()
    events: list[Event] = list(read_recording(tmp_path).events())
    [withdrawn] = said(events, Withdrawn)
    assert isinstance(withdrawn, Withdrawn)
    assert withdrawn.sequence == 2


async def test_an_item_that_takes_the_place_of_a_leased_one_is_recorded(tmp_path: Path) -> None:
    channel = Channel(int, name="numbers")
    recorder = Recorder(tmp_path / "1")
    recorder.record(channel)
    await channel.sender.put(1)
    async with channel.receiver.lease() as lease:
        lease.replace(0, 11)
    assert await channel.receiver.get() == 11
    recorder.close()
    recording = read_recording(tmp_path)
    [replaced] = recording.events(Replaced)
    assert replaced.sequence == 1
    assert recording.channel("numbers").decode(replaced.body()) == 11


async def test_a_latest_is_recorded_as_published_and_seen(tmp_path: Path) -> None:
    latest = Latest(Item, name="weights")
    recorder = Recorder(tmp_path / "1")
    recorder.record(latest)
    await latest.sender.publish(item(1))
    await latest.sender.publish(item(2))
    await latest.receiver.get()
    latest.close()
    recorder.close()
    recording = read_recording(tmp_path)
    published = list(recording.events(Published))
    assert [one.version for one in published] == [1, 2]
    assert recording.channel("weights").decode(published[1].body()).number == 2
    assert [(one.version, one.receiver) for one in recording.events(Seen)] == [(2, "main")]
    assert recording.channels["weights"].kind == "latest"


async def test_what_lay_in_a_channel_when_its_recording_began_is_in_it(tmp_path: Path) -> None:
    channel, latest = Channel(int, name="numbers"), Latest(int, name="newest")
    for number in (1, 2, 3):
        await channel.sender.put(number, key=number % 2)
    await latest.sender.publish(5)
    async with channel.receiver.lease(key=1):
        recorder = Recorder(tmp_path / "1")
        recorder.record(channel)
        recorder.record(latest)
    recorder.close()
    recording = read_recording(tmp_path)
    assert [(one.sequence, one.value) for one in recording.items("numbers")] == [
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    assert [one.version for one in recording.events(Published)] == [1]


async def test_members_of_a_union_that_look_alike_come_back_as_what_they_were(
    tmp_path: Path,
) -> None:
    channel = Channel[Left | Right](Left | Right, name="sides")
    recorder = Recorder(tmp_path / "1")
    recorder.record(channel)
    await channel.sender.put(Left(1))
    await channel.sender.put(Right(2))
    recorder.close()
    recording = read_recording(tmp_path)
    assert [one.value for one in recording.items("sides")] == [Left(1), Right(2)]
    assert recording.channels["sides"].type_text == "Left | Right"


async def test_a_channel_is_as_fast_as_ever_once_its_recorder_is_closed(tmp_path: Path) -> None:
    channel = Channel(int, name="numbers")
    recorder = Recorder(tmp_path / "1")
    recorder.record(channel)
    assert channel.queue.indirect
    recorder.close()
    assert channel.queue.tap is None
    assert not channel.queue.indirect
    await channel.sender.put(1)
    assert list(read_recording(tmp_path).events(Put)) == []


async def test_another_channel_of_the_same_name_is_refused(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "1")
    channel = Channel(int, name="numbers")
    recorder.record(channel)
    recorder.record(channel)
    with pytest.raises(RecordingError, match="'numbers' is recorded already"):
        recorder.record(Channel(int, name="numbers"))
    recorder.close()
    with pytest.raises(RecordingError, match="is not empty"):
        Recorder(tmp_path / "1")


async def test_a_channel_that_was_not_recorded_is_named_with_those_that_were(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path / "1")
    recorder.record(Channel(int, name="numbers"))
    recorder.close()
    recording = read_recording(tmp_path)
    with pytest.raises(NotRecorded, match=r"'letters' is not in .*: it has numbers"):
        list(recording.events(channel="letters"))


def declared_as(folder: Path, **changes: Any) -> Any:
    """The items of a recording whose channel was declared otherwise."""
    recording = read_recording(folder)
    channel = recording.channels["items"]
    channel._declared = msgspec.structs.replace(channel._declared, **changes)
    return list(recording.items("items"))


async def test_a_type_that_is_gone_or_has_changed_is_named(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "1")
    channel = Channel(Item, name="items")
    recorder.record(channel)
    await channel.sender.put(item(1))
    recorder.close()
    [was] = read_recording(tmp_path).events(Declared)
    for path in ("tests.recording.test_recording:Gone", "no.such.module:Item"):
        [found] = declared_as(tmp_path, type=path)
        with pytest.raises(TypeGone, match=path.replace(".", r"\.")):
            _ = found.value
    [found] = declared_as(tmp_path, schema=was.schema.replace("integer", "string"))
    with pytest.raises(TypeChanged, match=r"at .*Item\.number\.type it was string, and is integer"):
        _ = found.value
