"""Putting without asking, into lent room: nothing overtakes, nothing exceeds, nothing is lost in
silence."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from rlinf_async.channels import (
    Channel,
    ChannelClosed,
    ChannelFailed,
    ChannelFull,
    ConnectionLost,
    EndOfChannel,
    NoReceivers,
    Sender,
)
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.key_queue import KeyQueue
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.statistics import find_cycle
from rlinf_async.channels.wire import ChannelClient, Connection, protocol
from rlinf_async.channels.wire import sending as credit
from rlinf_async.channels.wire.sending import Transfers
from rlinf_async.testing import wait_all_blocked
from tests.channels.wire import remote_worker
from tests.channels.wire.harness import Wired, remote_pair, until, wired


async def put_all(sender: Sender[int], numbers: range, **options: Any) -> None:
    for number in numbers:
        await sender.put(number, **options)


async def with_credit(sender: Sender[int], channel: Channel[Any], **options: Any) -> None:
    """Put twice, after which room is lent, and take both out again."""
    await put_all(sender, range(2), **options)
    await until(lambda: channel.queue.credit)
    for _ in range(2):
        channel.receiver.get_nowait(**options)


def lent_here(sender: Sender[Any], key: str | None = None) -> int:
    """Items that this sender can put without asking."""
    end: Any = sender
    return int(end._transfers.accounts.find(end._wire.queue, key).items)


async def test_a_put_into_lent_room_returns_at_once_and_arrives_in_order() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        putting = sender.put(2)
        with pytest.raises(StopIteration):  # without a turn of the loop
            putting.send(None)
        await put_all(sender, range(3, 50))
        assert await channel.receiver.get_batch(weight=48) == list(range(2, 50))


async def test_lent_room_counts_so_the_capacity_is_never_exceeded() -> None:
    channel = Channel(int, name="numbers", capacity=8)
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        putting = asyncio.create_task(put_all(sender, range(100)))
        for number in range(100):
            await wait_all_blocked()
            assert statistics_of(channel.queue).depth + channel.queue.credit <= 8
            assert await channel.receiver.get() == number
        await putting
        assert statistics_of(channel.queue).credit_waits > 0


async def test_at_most_half_of_the_free_room_is_lent() -> None:
    channel = Channel(int, name="numbers", capacity=64)
    async with remote_pair(channel) as (sender, _):
        await put_all(sender, range(2))
        await until(lambda: channel.queue.credit)
        assert statistics_of(channel.queue).credit == (64 - 2) // 2


async def test_a_wait_for_lent_room_names_who_has_it_and_is_no_deadlock() -> None:
    channel = Channel(int, name="numbers", capacity=8)
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        putting = asyncio.create_task(put_all(channel.sender, range(8)))
        await asyncio.sleep(0)
        [wait] = channel.waits()
        assert wait.held_by == ("w",)
        assert str(wait).endswith("can end this wait; credit is held by w, and recalled")
        alone = msgspec.structs.replace(wait, unblockers=())
        assert find_cycle([alone]) == ()
        assert find_cycle([msgspec.structs.replace(alone, held_by=())]) != ()
        await putting


async def test_lent_room_is_asked_back_when_another_putter_waits_for_it() -> None:
    channel = Channel(int, name="numbers", capacity=8)
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        lent = statistics_of(channel.queue).credit
        assert lent == lent_here(sender) > 0
        local = channel.sender
        await put_all(local, range(8))  # the whole capacity: the last of them wait for what is lent
        assert statistics_of(channel.queue).depth == 8
        assert (statistics_of(channel.queue).credit, lent_here(sender)) == (0, 0)


async def test_a_put_without_waiting_is_told_full_and_asks_lent_room_back() -> None:
    channel = Channel(int, name="numbers", capacity=8)
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        for number in range(8 - channel.queue.credit):
            channel.sender.put_nowait(number)
        with pytest.raises(ChannelFull):
            channel.sender.put_nowait(8)
        await until(lambda: channel.queue.credit == 0)
        channel.sender.put_nowait(8)


async def test_weight_is_lent_too_and_a_heavier_item_asks() -> None:
    channel = Channel(int, name="numbers", capacity=64, max_weight=20)
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        putting = asyncio.create_task(put_all(sender, range(40), weight=3))
        for number in range(40):
            await wait_all_blocked()
            queue = channel.queue
            assert queue.unkeyed.weight + queue.unkeyed.reserved_weight <= 20
            assert await channel.receiver.get() == number
        await putting


async def test_a_get_that_waits_with_a_put_for_lent_room_is_served_when_it_comes_back() -> None:
    channel = Channel(int, name="numbers", capacity=64, max_weight=40)
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        getting = asyncio.create_task(channel.receiver.get())
        await wait_all_blocked()
        putting = asyncio.create_task(channel.sender.put(1, weight=39))
        later = asyncio.create_task(channel.receiver.get())
        assert await getting == 1
        await putting
        await sender.put(2)
        assert await later == 2


async def test_a_put_cannot_overtake_one_that_waits_without_credit() -> None:
    channel = Channel(int, name="numbers", capacity=64, max_weight=40)
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        heavy = asyncio.create_task(sender.put(1, weight=39))
        await asyncio.sleep(0)
        with sender.clone() as first, sender.clone() as second:
            light = [asyncio.create_task(first.put(2)), asyncio.create_task(second.put(3))]
            got = [await channel.receiver.get() for _ in range(3)]
            await asyncio.gather(heavy, *light)
        assert got == [1, 2, 3]


async def test_all_senders_of_one_key_share_what_is_lent() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        first, second = (owner.sender(channel, connection) for _ in range(2))
        await with_credit(first, channel)
        lent = lent_here(second)
        assert lent > 0
        await second.put(1)
        assert lent_here(first) == lent - 1
        await asyncio.gather(*(first.put(number) for number in range(5)))
        assert lent_here(second) == lent - 6
        connection.close()
        await connection.wait_closed()
        assert statistics_of(channel.queue).puts == 8


async def test_many_tasks_on_one_sender_keep_their_order_and_lose_nothing() -> None:
    channel = Channel(int, name="numbers", capacity=16)
    async with remote_pair(channel) as (sender, _):

        async def produce(task: int) -> None:
            await put_all(sender, range(task * 1000, task * 1000 + 50))

        tasks = [asyncio.create_task(produce(task)) for task in range(8)]
        got = [await channel.receiver.get() for _ in range(400)]
        await asyncio.gather(*tasks)
        for task in range(8):
            mine = [number for number in got if number // 1000 == task]
            assert mine == list(range(task * 1000, task * 1000 + 50))


async def test_lent_room_stays_while_nobody_else_wants_it() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel, key="env")
        lent = statistics_of(channel.queue).credit
        await asyncio.sleep(1.5)
        assert statistics_of(channel.queue).credit == lent == lent_here(sender, "env") > 0
        putting = sender.put(2, key="env")
        with pytest.raises(StopIteration):  # the first put after a pause does not ask either
            putting.send(None)
        assert await channel.receiver.get(key="env") == 2


async def test_a_key_is_forgotten_when_its_room_is_asked_back() -> None:
    channel = Channel(int, name="numbers", capacity=8)
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel, key="env")
        putting = asyncio.create_task(put_all(channel.sender, range(8), key="env"))
        for number in range(8):
            assert await channel.receiver.get(key="env") == number
        await putting
        await until(lambda: not channel.queue.keys)
        assert statistics_of(channel.queue).credit == 0


async def test_more_keys_than_are_remembered_lose_no_room() -> None:
    channel = Channel(int, name="numbers", capacity=4)
    async with remote_pair(channel) as (sender, _):
        for number in range(credit.MAX_ACCOUNTS + 20):
            await put_all(sender, range(2), key=number)
            assert [await channel.receiver.get(key=number) for _ in range(2)] == [0, 1]
        await sender.flush()
        end: Any = sender
        held = sum(one.items for one in end._transfers.accounts.registered.values())
        assert statistics_of(channel.queue).credit == held
        assert len(end._transfers.accounts.registered) <= credit.MAX_ACCOUNTS


@pytest.mark.parametrize(("capacity", "max_weight", "parties"), [(64, 1, 1), (4, None, 4)])
async def test_keys_that_never_get_credit_do_not_stay_in_memory(
    capacity: int, max_weight: int | None, parties: int
) -> None:
    channel = Channel(int, name="numbers", capacity=capacity, max_weight=max_weight)
    async with wired() as owner:
        connections = [await owner.join(f"w{party}") for party in range(parties)]
        senders = [owner.sender(channel, connection) for connection in connections]
        for key in range(300):
            for number, sender in enumerate(senders):
                putting = asyncio.create_task(put_all(sender, range(number, number + 2), key=key))
                for _ in range(2):
                    await channel.receiver.get(key=key)
                await putting
        for sender in senders:
            await sender.flush()
        unspent = [queue for queue in channel.queue.keys.values() if queue.reserved]
        await until(lambda: [*channel.queue.keys.values()] == unspent)
        for connection in connections:
            connection.close()
            await connection.wait_closed()


async def test_items_put_on_credit_go_in_the_data_lane() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        end: Any = sender
        outbox = end._wire.connection.outbox
        outbox.pause()
        await put_all(sender, range(5))
        end._wire.connection.notify("channel.stale", protocol.End(0), control=True)
        assert len(outbox._data) == 1  # the items, together
        assert len(outbox._control) == 1
        outbox.resume()
        await sender.flush()
        assert await channel.receiver.get_batch(weight=5) == list(range(5))


# ---- what became of an item


async def test_an_item_refused_because_the_channel_closed_is_raised_at_the_next_put() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        await sender.put(1)
        channel.close()
        await until(lambda: channel.queue.refused)
        await wait_all_blocked()
        with pytest.raises(ChannelClosed, match="'numbers' was closed") as caught:
            await sender.put(2)
        assert "1 items of this sender were under way" in caught.value.__notes__[0]
        assert statistics_of(channel.queue).refused == 1
        with pytest.raises(ChannelClosed):
            await sender.put(3)


async def test_an_item_refused_because_the_channel_failed_is_raised_by_close() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        await sender.put(1)
        channel.fail("the simulator diverged")
        await until(lambda: channel.queue.refused)
        await wait_all_blocked()
        with pytest.raises(ChannelFailed, match="diverged"):
            sender.close()
        sender.close()


async def test_an_item_refused_because_nobody_receives_is_raised_by_flush() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, receiver):
        await with_credit(sender, channel)
        channel.receiver.close()
        receiver.close()
        await until(
            lambda: channel.queue.no_receivers_left or not statistics_of(channel.queue).receivers
        )
        await sender.put(1)
        with pytest.raises(NoReceivers):
            await sender.flush()


async def test_the_end_of_a_call_is_no_failure_where_its_consumers_left_items() -> None:
    numbers, closed = Channel(int, name="numbers"), Channel(int, name="closed")
    async with wired() as owner:
        connection = await owner.join()
        call = ChannelClient(connection)
        for channel in (numbers, closed):
            end = call.end(owner.channels.end_ref(channel.sender, "w"), int)
            assert isinstance(end, Sender)
            await with_credit(end, channel)
            await end.put(1)  # is on its way
            if channel is numbers:
                channel.receiver.close()
            else:
                channel.close()
        with pytest.raises(ChannelClosed):
            await call.flush()
        await call.flush()
        assert [statistics_of(channel.queue).refused for channel in (numbers, closed)] == [1, 1]
        connection.close()
        await connection.wait_closed()


async def test_a_put_after_the_channel_was_closed_asks_and_is_told() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        channel.close()
        await until(lambda: lent_here(sender) == 0)
        with pytest.raises(ChannelClosed):
            await sender.put(1)


async def test_an_item_refused_after_its_sender_closed_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        await sender.put(1)
        sender.close()
        channel.close()
        await until(lambda: "are lost" in caplog.text)
        assert "1 items that were put over the connection to owner are lost" in caplog.text


async def test_a_sender_is_told_once_that_nobody_receives() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, receiver):
        await with_credit(sender, channel)
        channel.receiver.close()
        await until(lambda: statistics_of(channel.queue).receivers == 1)
        await put_all(sender, range(5))
        channel.queue.remove_receiver(next(iter(channel.queue.receivers)))
        with pytest.raises(NoReceivers):
            await sender._ask(sender._account, Encoded(b"\x01"), 1)  # type: ignore[attr-defined]
        await sender.flush()
        assert statistics_of(channel.queue).refused == 5
        receiver.close()


async def put_refused_and_fail(sender: Sender[int], channel: Channel[int]) -> None:
    with sender:
        await sender.put(1)
        channel.close()
        await until(lambda: channel.queue.refused)
        await wait_all_blocked()
        raise LookupError("the first cause")


async def test_an_error_inside_the_block_of_a_sender_is_the_one_that_is_raised() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        with pytest.raises(LookupError, match="the first cause") as caught:
            await put_refused_and_fail(sender, channel)
        assert "'numbers' was closed" in caught.value.__notes__[0]


async def test_flush_returns_when_every_item_is_in_the_channel() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        await with_credit(sender, channel)
        await put_all(sender, range(20))
        await sender.flush()
        assert statistics_of(channel.queue).depth == 20
        local = channel.sender
        await local.flush()


async def test_a_lease_is_settled_after_the_items_that_were_put_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks, results = Channel(int, name="tasks"), Channel(int, name="results")
    async with wired() as owner:
        connection = await owner.join()
        taking, giving = owner.receiver(tasks, connection), owner.sender(results, connection)
        await with_credit(giving, results)
        await tasks.sender.put(7)
        depths: list[int] = []
        settle = KeyQueue.settle

        def watch(queue: KeyQueue, *settled: Any) -> None:
            if queue.channel.name == "tasks":
                depths.append(statistics_of(results.queue).depth)
            settle(queue, *settled)

        monkeypatch.setattr(KeyQueue, "settle", watch)
        async with taking.lease() as taken:
            await giving.put(taken[0])
        await until(lambda: depths)
        assert depths == [1]
        connection.close()
        await connection.wait_closed()


# ---- the end of a connection


async def cut(connection: Connection, owner: Wired) -> None:
    connection.abort("a test")
    await until(lambda: not owner.server.connections)


async def test_closing_a_connection_waits_until_its_items_are_confirmed() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        sender = owner.sender(channel, connection)
        await with_credit(sender, channel)
        await put_all(sender, range(20))
        connection.close()
        connection.close()
        assert not connection.closed
        await connection.wait_closed()
        assert statistics_of(channel.queue).depth == 20


async def test_a_cut_connection_reports_what_was_not_confirmed() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        sender, other = (owner.sender(channel, connection) for _ in range(2))
        await with_credit(sender, channel)
        await put_all(sender, range(3))
        await cut(connection, owner)
        with pytest.raises(ConnectionLost, match="3 items of this sender were not confirmed"):
            sender.close()
        sender.close()
        other.close()


async def test_what_a_lost_process_was_lent_is_free_again() -> None:
    channel = Channel(int, name="numbers", capacity=8)
    async with wired() as owner:
        connection = await owner.join()
        sender = owner.sender(channel, connection)
        await with_credit(sender, channel)
        assert statistics_of(channel.queue).credit
        await cut(connection, owner)
        assert statistics_of(channel.queue).credit == 0
        for number in range(8):
            channel.sender.put_nowait(number)


async def test_items_that_were_put_before_the_end_are_received_before_it() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, receiver):
        await with_credit(sender, channel)
        await put_all(sender, range(10))
        sender.close()
        assert [number async for number in receiver] == list(range(10))
        with pytest.raises(EndOfChannel):
            await receiver.get()


async def test_a_process_that_promises_more_than_it_was_lent_is_cut_off() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        sender: Any = owner.sender(channel, connection)
        await with_credit(sender, channel)
        run = protocol.Run(sender._wire.queue, sender._number, None, 1, 60)
        transfer = protocol.Transfer([run], [1] * 60)
        connection.notify("channel.transfer", transfer, Encoded(bytes(60)))
        _, reason = await owner.lost.get()
        assert "60 items of weight 0 came for channel 'numbers'" in reason
        assert statistics_of(channel.queue).depth == 0


def run_worker(owner: Wired, ref: Any, what: str) -> subprocess.Popen[bytes]:
    import msgspec

    return subprocess.Popen(
        [sys.executable, "-m", remote_worker.__name__, str(owner.path),
         msgspec.json.encode(ref).decode(), what],
        stderr=subprocess.PIPE,
    )  # fmt: skip


async def test_a_process_that_ends_without_closing_loses_nothing_in_silence() -> None:
    channel = Channel(int, name="numbers", capacity=4096)
    async with wired() as owner:
        process = run_worker(owner, owner.channels.end_ref(channel.sender, "w"), "500 and leave")
        await owner.lost.get()
        _, said = await asyncio.to_thread(process.communicate)
        assert process.returncode == 0
        depth = statistics_of(channel.queue).depth
        assert depth == 500 or b"before owner has confirmed" in said


async def test_a_killed_producer_leaves_a_beginning_of_what_it_put() -> None:
    channel = Channel(int, name="numbers", capacity=4096)
    async with wired() as owner:
        process = run_worker(owner, owner.channels.end_ref(channel.sender, "w"), "1000000")
        await until(lambda: statistics_of(channel.queue).depth > 1000)
        os.kill(process.pid, signal.SIGKILL)
        await owner.lost.get()
        await asyncio.to_thread(process.communicate)
        depth = statistics_of(channel.queue).depth
        assert statistics_of(channel.queue).credit == 0
        assert await channel.receiver.get_batch(weight=depth) == list(range(depth))


async def test_the_transfers_of_a_connection_are_found_again() -> None:
    async with wired() as owner:
        connection = await owner.join()
        assert Transfers.of(connection) is Transfers.of(connection)
        assert ChannelClient(connection) is not ChannelClient(connection)
        connection.close()
        await connection.wait_closed()
