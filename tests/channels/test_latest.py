"""`Latest` holds only the newest value."""

from __future__ import annotations

import asyncio

import pytest

from rlinf_async.channels import (
    ChannelClosed,
    ChannelFailed,
    EndOfChannel,
    Latest,
    LatestReceiver,
    WrongItemType,
)
from tests.channels.transport import Transport


async def test_versions_count_from_one(transport: Transport) -> None:
    sender, receiver = await transport.latest_ends(Latest(str, name="weights"))
    assert receiver.version == 0
    assert [await sender.publish(text) for text in ("a", "b")] == [1, 2]
    assert (await receiver.get(), receiver.version) == ("b", 2)


async def test_a_get_waits_for_something_newer_than_it_has(transport: Transport) -> None:
    sender, receiver = await transport.latest_ends(Latest(str, name="weights"))
    await sender.publish("a")
    assert await receiver.get() == "a"
    waiting = asyncio.create_task(receiver.get())
    await transport.settle()
    assert not waiting.done()
    await sender.publish("b")
    assert await waiting == "b"


async def test_a_get_may_ask_for_newer_than_a_version(transport: Transport) -> None:
    sender, receiver = await transport.latest_ends(Latest(str, name="weights"))
    waiting = asyncio.create_task(receiver.get(newer_than=2))
    for text in ("a", "b"):
        await sender.publish(text)
        await transport.settle()
        assert not waiting.done()
    await sender.publish("c")
    assert await waiting == "c"
    assert await receiver.get(newer_than=0) == "c"  # seen before, asked for again


async def test_every_receiver_sees_the_newest_value(transport: Transport) -> None:
    latest = Latest(int, name="weights")
    sender, receiver = await transport.latest_ends(latest)
    waiting = [asyncio.create_task(end.get()) for end in (receiver, latest.receiver)]
    await transport.settle()
    await sender.publish(7)
    assert await asyncio.gather(*waiting) == [7, 7]


async def test_values_that_nobody_saw_are_counted(transport: Transport) -> None:
    latest = Latest(int, name="weights")
    sender, receiver = await transport.latest_ends(latest)
    for value in (1, 2, 3):
        await sender.publish(value)
    assert await receiver.get() == 3
    await sender.publish(4)
    seen = await latest.statistics()
    assert (seen.name, seen.version, seen.superseded, seen.waiting) == ("weights", 4, 2, 0)


async def test_iteration_ends_when_the_sender_closes(transport: Transport) -> None:
    sender, receiver = await transport.latest_ends(Latest(int, name="weights"))
    got: list[int] = []

    async def watch() -> None:
        got.extend([value async for value in receiver])

    watching = asyncio.create_task(watch())
    for value in range(3):
        await sender.publish(value)
        await transport.settle()
    sender.close()
    await watching
    assert got == [0, 1, 2]


async def test_the_last_value_can_be_had_after_the_close(transport: Transport) -> None:
    sender, receiver = await transport.latest_ends(Latest(int, name="weights"))
    await sender.publish(1)
    sender.close()
    assert await receiver.get() == 1
    with pytest.raises(EndOfChannel, match="'weights' has ended at version 1"):
        await receiver.get()
    with pytest.raises(ChannelClosed, match="'weights' was closed"):
        await sender.publish(2)


async def test_a_failure_reaches_waiting_and_later_uses(transport: Transport) -> None:
    latest = Latest(int, name="weights")
    sender, receiver = await transport.latest_ends(latest)
    waiting = asyncio.create_task(receiver.get())
    await transport.settle()
    latest.fail(ValueError("loss is NaN"))
    for use in (waiting, receiver.get(), sender.publish(1)):
        with pytest.raises(ChannelFailed, match="'weights' failed: ValueError: loss is NaN"):
            await use


async def test_every_failure_is_an_error_of_its_own_with_the_first_cause() -> None:
    latest = Latest(int, name="weights")
    cause = ValueError("loss is NaN")
    latest.fail(cause)
    latest.fail("a later error")
    raised: list[ChannelFailed] = []
    for _ in range(2):
        with pytest.raises(ChannelFailed) as failed:
            await latest.sender.publish(1)
        raised.append(failed.value)
    assert raised[0] is not raised[1]
    assert [error.__cause__ for error in raised] == [cause, cause]


async def test_a_cancelled_get_is_forgotten(transport: Transport) -> None:
    latest = Latest(int, name="weights")
    sender, receiver = await transport.latest_ends(latest)
    waiting = asyncio.create_task(receiver.get())
    await transport.settle()
    assert (await latest.statistics()).waiting == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await transport.settle()
    assert (await latest.statistics()).waiting == 0
    await sender.publish(1)
    assert await receiver.get() == 1


async def test_a_value_of_another_type_is_refused() -> None:
    latest = Latest(int, name="weights")
    with pytest.raises(WrongItemType, match="'weights' carries int, not str"):
        await latest.sender.publish("seven")  # type: ignore[arg-type]
    assert latest.version == 0


async def test_a_get_without_waiting_gives_nothing_twice() -> None:
    latest = Latest(int, name="weights")
    receiver = latest.receiver
    assert receiver.get_nowait() is None
    await latest.sender.publish(1)
    assert (receiver.get_nowait(), receiver.get_nowait()) == (1, None)


async def test_who_waits_for_a_newer_value_is_reported(transport: Transport) -> None:
    latest = Latest(int, name="weights")
    _, receiver = await transport.latest_ends(latest)
    await latest.sender.publish(1)
    waiting = asyncio.create_task(receiver.get(newer_than=4))
    await transport.settle()
    [wait] = latest.waits()
    assert (wait.operation, wait.channel, wait.key) == ("get", "weights", "newer than 4")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_clone_has_seen_what_its_original_has_and_reads_on_its_own(
    transport: Transport,
) -> None:
    sender, receiver = await transport.latest_ends(Latest(int, name="decisions"))
    await sender.publish(1)
    assert await receiver.get() == 1
    clone = receiver.clone()
    await sender.publish(2)
    assert await receiver.get() == 2
    assert clone.version == 1
    assert await clone.get() == 2


async def test_tasks_that_share_a_receiver_share_its_version_and_those_with_clones_do_not(
    transport: Transport,
) -> None:
    sender, receiver = await transport.latest_ends(latest := Latest(str, name="weights"))
    assert latest.receiver is latest.receiver
    clones = receiver.clone(), receiver.clone()

    async def read(own: LatestReceiver[str]) -> str:
        return await own.get()

    await sender.publish("a")
    first = asyncio.create_task(read(receiver))
    await transport.settle()
    second = asyncio.create_task(read(receiver))
    await transport.settle()
    assert first.done()
    assert not second.done()
    assert [await asyncio.create_task(read(clone)) for clone in clones] == ["a", "a"]
    await sender.publish("b")
    assert await second == "b"
