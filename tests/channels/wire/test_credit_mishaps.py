"""What goes wrong around lent room: notices that cross, errors that come late, ends that are
dropped. Nothing is lost in silence, and no connection is cut for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlinf_async.channels import (
    Channel,
    ChannelClosed,
    ChannelFailed,
    ConnectionLost,
    ItemTooLarge,
    NoReceivers,
    Sender,
)
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import Connection
from rlinf_async.channels.wire import sending as credit
from rlinf_async.channels.wire.sending import Transfers
from rlinf_async.testing import wait_all_blocked
from tests.channels.wire.harness import Wired, remote_pair, until, wired
from tests.channels.wire.test_credit import lent_here, put_all, with_credit


def transfers_of(sender: Sender[Any]) -> Transfers:
    end: Any = sender
    found: Transfers = end._transfers
    return found


async def until_hungry(sender: Sender[int], channel: Channel[Any]) -> None:
    """Put until there is too little room to lend more; some of what was lent is left."""
    for number in range(channel.queue.capacity):
        if channel.queue.unkeyed.room_wanted:
            break
        await sender.put(number)
        await sender.flush()
    assert channel.queue.unkeyed.room_wanted
    assert lent_here(sender) == channel.queue.credit > 0


def idle(sender: Sender[Any]) -> None:
    """Let the time pass in which room that is not used goes back."""
    for _ in range(2):
        transfers_of(sender).accounts.sweep()


def small_heads(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    for where in ("frames", "session.outbox"):
        monkeypatch.setattr(f"rlinf_async.channels.wire.{where}.MAX_HEAD_BYTES", limit)


# ---- room that goes back


async def test_room_that_was_not_used_goes_back_for_good_from_a_channel_that_is_half_full() -> None:
    channel = Channel(int, name="numbers", capacity=32)
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        await until_hungry(sender, channel)
        idle(sender)
        await until(lambda: channel.queue.credit == 0)
        await wait_all_blocked()
        assert (channel.queue.credit, lent_here(sender)) == (0, 0)
        depth = statistics_of(channel.queue).depth
        await put_all(sender, range(3))
        await sender.flush()
        assert statistics_of(channel.queue).depth == depth + 3


@pytest.mark.parametrize("loop_kind", ["asyncio"])  # on another two messages do not cross
async def test_room_that_is_lent_while_other_room_goes_back_stays_lent(loop_kind: str) -> None:
    channel = Channel(int, name="numbers", capacity=32)
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        await until_hungry(sender, channel)
        while channel.queue.unkeyed.entries:
            channel.receiver.get_nowait()
        idle(sender)  # crosses what is being lent
        await until(lambda: lent_here(sender))
        await sender.flush()
        assert lent_here(sender) == channel.queue.credit
        await put_all(sender, range(3))
        await sender.flush()
        assert await channel.receiver.get_batch(weight=3) == [0, 1, 2]


async def test_room_that_is_asked_back_after_its_key_was_forgotten_is_answered() -> None:
    channel = Channel(int, name="numbers", capacity=8)
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel, key="env")
        while lent_here(sender, "env"):
            await sender.put(0, key="env")
        idle(sender)  # it has nothing left, and is forgotten
        putting = [asyncio.create_task(channel.sender.put(1, key="env")) for _ in range(8)]
        for _ in range(8):
            await channel.receiver.get(key="env")
        await until(lambda: not channel.queue.credit)
        taken = await channel.receiver.get_batch(weight=8, at_least=1, key="env")
        await asyncio.gather(*putting)
        assert set(taken) <= {0, 1}
        while channel.queue.keys and channel.queue.keys["env"].entries:
            channel.receiver.get_nowait(key="env")
        await until(lambda: "env" not in channel.queue.keys)


async def test_channels_that_are_not_used_any_more_leave_room_for_others_to_be_lent_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(credit, "MAX_ACCOUNTS", 4)
    monkeypatch.setattr(credit, "SWEEP_SECONDS", 0.0)
    async with wired() as owner:
        connection = await owner.join()
        channels = [Channel(int, name=f"numbers {number}") for number in range(12)]
        senders = [owner.sender(channel, connection) for channel in channels]
        for sender, channel in (*zip(senders, channels, strict=True), (senders[0], channels[0])):
            await put_all(sender, range(6))
            await sender.flush()
            assert channel.queue.credit == lent_here(sender) > 0
            assert await channel.receiver.get_batch(weight=6) == list(range(6))
            assert len(transfers_of(sender).accounts.registered) <= 4
        connection.close()
        await connection.wait_closed()


# ---- what cannot be sent


async def test_a_weight_that_cannot_travel_is_refused_at_once() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        with pytest.raises(ValueError, match="at most 1099511627776"):
            await sender.put(1, weight=2**64)
        await sender.put(2)
        await sender.flush()
        assert await channel.receiver.get() == 2


async def test_many_tasks_that_put_under_many_keys_in_one_turn_lose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = Channel(int, name="numbers", capacity=64)
    keys = [f"{'an environment of many ' * 5}{number:03}" for number in range(20)]
    turns = range(20)
    async with remote_pair(channel) as (sender, _):
        for key in keys:
            await with_credit(sender, channel, key=key)
        # Of 400 changes of key, as many fit in one message as in a real one of 5,000.
        small_heads(monkeypatch, 24 * 1024)
        await asyncio.gather(*(sender.put(turn, key=key) for turn in turns for key in keys))
        await sender.flush()
        for key in keys:
            assert await channel.receiver.get_batch(weight=20, key=key) == list(turns)


async def test_a_very_long_key_is_not_lent_to() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        key = "k" * 1000
        await put_all(sender, range(5), key=key)
        assert channel.queue.credit == 0
        assert await channel.receiver.get_batch(weight=5, key=key) == list(range(5))


# ---- who is told


async def cut(connection: Connection, owner: Wired) -> None:
    connection.abort("a test")
    await until(lambda: not owner.server.connections)


async def test_whoever_was_told_of_one_error_is_told_of_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = Channel(bytes, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        sender: Any = owner.sender(channel, connection)
        for _ in range(2):
            await sender.put(b"")
        await until(lambda: lent_here(sender))
        monkeypatch.setattr("rlinf_async.channels.wire.frames.MAX_MESSAGE_BYTES", 300_000)
        with pytest.raises(ItemTooLarge):
            await sender.put(bytes(300_001))
        await sender.put(b"")
        await cut(connection, owner)
        with pytest.raises(ConnectionLost, match="1 items of this sender were not confirmed"):
            await sender.flush()


async def test_an_error_of_items_under_way_is_noted_on_that_of_a_put_that_asked() -> None:
    channel = Channel(int, name="numbers", capacity=4)
    async with wired() as owner:
        connection = await owner.join()
        sender = owner.sender(channel, connection)
        await with_credit(sender, channel)
        lent = lent_here(sender)
        await put_all(sender, range(lent))
        asking = asyncio.create_task(put_all(sender, range(8)))
        await asyncio.sleep(0)
        await cut(connection, owner)
        with pytest.raises(ConnectionLost) as caught:
            await asking
        assert f"{lent} items of this sender were not confirmed" in caught.value.__notes__[0]


async def test_items_refused_under_many_keys_are_all_told_of_however_long_the_error_is() -> None:
    channel = Channel(int, name="numbers", capacity=1024)
    keys = [f"env {number}" for number in range(60)]
    async with remote_pair(channel) as (sender, _):
        for key in keys:
            await with_credit(sender, channel, key=key)
        await sender.flush()
        for key in keys:
            await sender.put(2, key=key)
        channel.fail("the simulator diverged: " + "a long traceback " * 250)
        with pytest.raises(ChannelFailed, match="the simulator diverged") as caught:
            await sender.flush()
        assert "60 items of this sender were under way" in caught.value.__notes__[0]
        assert len(str(caught.value)) <= 500


async def test_what_many_senders_are_told_takes_several_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = Channel(int, name="numbers", capacity=1024)
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        senders = [sender.clone() for _ in range(100)]
        await sender.flush()
        small_heads(monkeypatch, 32 * 1024)
        for one in senders:
            await one.put(2)
        channel.fail("the simulator diverged: " + "a long traceback " * 250)
        for one in senders:
            with pytest.raises(ChannelFailed, match="the simulator diverged"):
                await one.flush()
            one.close()


async def test_a_sender_that_is_dropped_without_being_told_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        clone = sender.clone()
        await clone.put(1)
        channel.close()
        await until(lambda: channel.queue.refused)
        await wait_all_blocked()
        with pytest.warns(ResourceWarning, match="was dropped while it was open"):
            del clone
        assert "a sender of channel 'numbers' was dropped: ChannelClosed" in caplog.text


async def test_a_sender_is_told_again_when_items_were_taken_in_between() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        first, second = (owner.sender(channel, connection) for _ in range(2))
        for _ in range(2):
            receiver = channel.receiver.clone()
            await put_all(first, range(4))
            await second.put(0)
            await first.flush()
            assert lent_here(second) > 0
            await second.put(1)
            receiver.close()
            with pytest.raises(NoReceivers):
                await second.flush()
        connection.close()
        await connection.wait_closed()


async def test_a_peer_that_sends_what_is_malformed_is_not_waited_for() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        sender = owner.sender(channel, connection)
        await with_credit(sender, channel)
        await sender.put(1)
        connection.received(100, connection.reader.feed(bytes(100)))
        assert connection.closed
        with pytest.raises(ConnectionLost, match="a malformed frame"):
            sender.close()


async def test_a_closed_channel_is_said_once_though_items_of_several_messages_were_refused() -> (
    None
):
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        await put_all(sender, range(4))
        channel.close()
        await until(lambda: channel.queue.refused)
        await wait_all_blocked()
        with pytest.raises(ChannelClosed):
            sender.close()
        sender.close()
