"""Items that come ahead of the gets that will take them: theirs is the channel until then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlinf_async.channels import (
    Channel,
    ChannelClosed,
    ChannelEmpty,
    ChannelFailed,
    ConnectionLost,
    EndOfChannel,
    MalformedFrame,
    Receiver,
    Sender,
)
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import owner_deliveries, receiving
from rlinf_async.testing import nothing_left_waiting, wait_all_blocked
from tests.channels.wire.harness import PATIENCE, Wired, anything_fits, remote_pair, until, wired

pytestmark = pytest.mark.usefixtures("prefetch_at_once")


@asynccontextmanager
async def ahead(
    channel: Channel[int], count: int = 40
) -> AsyncIterator[tuple[Sender[int], Receiver[int]]]:
    """Ends in another process; the receiver has taken 0 to 2, and has items from 3 on ahead."""
    async with remote_pair(channel) as (sender, receiver):
        with channel.sender.clone("filler") as filler:
            for number in range(count):
                await filler.put(number)
        assert [await receiver.get() for _ in range(3)] == [0, 1, 2]
        await settled()
        assert statistics_of(channel.queue).prefetched > 0
        yield sender, receiver


async def settled() -> None:
    for _ in range(4):
        await wait_all_blocked()
        await asyncio.sleep(0)


async def test_items_come_ahead_and_are_taken_in_order_without_a_turn() -> None:
    channel = Channel(int, name="numbers")
    async with ahead(channel) as (_, receiver):
        getting = receiver.get()
        with pytest.raises(StopIteration) as caught:
            getting.send(None)
        assert caught.value.value == 3
        assert [await receiver.get() for _ in range(36)] == list(range(4, 40))
        await settled()
        seen = statistics_of(channel.queue)
        assert (seen.gets, seen.depth, seen.prefetched) == (40, 0, 0)
        nothing_left_waiting(channel)


async def test_a_receiver_that_gets_once_in_a_while_is_sent_nothing_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "HORIZON", 0.0)
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, receiver):
        for number in range(20):
            await sender.put(number)
        for number in range(20):
            assert await receiver.get() == number
            assert statistics_of(channel.queue).prefetched == 0


async def test_a_quick_receiver_is_sent_items_ahead_however_long_it_waits_for_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (_, receiver):
        end: Any = receiver
        monkeypatch.setattr(receiving, "HORIZON", 0.005)
        monkeypatch.setattr(end._links, "now", lambda: clock[0])
        for number in range(2):
            getting = asyncio.create_task(receiver.get())
            await settled()
            clock[0] += 10.0  # while it waits
            channel.sender.put_nowait(number)
            await getting
        for number in (2, 3):
            channel.sender.put_nowait(number)
        assert await receiver.get() == 2
        assert statistics_of(channel.queue).prefetched == 1


async def test_whoever_waits_is_sent_an_item_at_once_and_not_a_turn_later() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (_, receiver):
        getting = asyncio.create_task(receiver.get())
        await settled()
        channel.sender.put_nowait(1)
        seen = statistics_of(channel.queue)
        assert (seen.gets, seen.depth, [edge.items for edge in seen.edges]) == (1, 0, [1])
        assert await getting == 1


async def test_what_answers_an_item_and_the_next_get_go_in_one_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questions, answers = Channel(int, name="questions"), Channel(int, name="answers")
    async with wired() as owner:
        connection = await owner.join()
        asked, told = owner.receiver(questions, connection), owner.sender(answers, connection)

        async def answer() -> None:
            async for question in asked:
                await told.put(question)

        async def there_and_back(number: int) -> None:
            await questions.sender.put(number)
            assert await answers.receiver.get() == number

        answering = asyncio.create_task(answer())
        for number in range(8):  # by then, room was lent for answers
            await there_and_back(number)
        connection.monitor.stop()  # a sign of life would be a write of its own
        transport: Any = connection.outbox._transport
        written: list[bytes] = []

        class Writing:
            def write(self, data: bytes) -> None:
                written.append(data)
                transport.write(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(transport, name)

        monkeypatch.setattr(connection.outbox, "_transport", Writing())
        await there_and_back(8)
        await settled()
        assert len(written) == 1
        questions.sender.close()
        await answering


async def test_what_came_ahead_counts_to_depth_and_capacity() -> None:
    channel = Channel(int, name="numbers", capacity=40)
    async with ahead(channel) as (_, receiver):
        assert statistics_of(channel.queue).depth == 37
        local = channel.sender
        for number in range(40, 43):
            local.put_nowait(number)
        full = asyncio.create_task(local.put(43))
        await settled()
        assert not full.done()
        assert await receiver.get() == 3
        await full
        assert statistics_of(channel.queue).depth == 40
        assert [await receiver.get() for _ in range(40)] == list(range(4, 44))


async def test_what_came_ahead_goes_back_when_another_receiver_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner_deliveries, "ALONE_SECONDS", 3600.0)
    channel = Channel(int, name="numbers")
    async with ahead(channel) as (_, receiver):
        assert await channel.receiver.get() == 3  # the oldest that nobody has taken
        assert statistics_of(channel.queue).prefetched == 0
        assert [await receiver.get() for _ in range(5)] == [4, 5, 6, 7, 8]
        assert statistics_of(channel.queue).prefetched == 0  # the key has two readers now


async def test_who_finds_nothing_without_waiting_asks_for_what_went_ahead() -> None:
    channel = Channel(int, name="numbers")
    async with ahead(channel):
        local = channel.receiver
        with pytest.raises(ChannelEmpty):
            local.get_nowait()
        await settled()
        assert local.get_nowait() == 3


async def test_two_receivers_that_stream_share_and_neither_starves() -> None:
    channel = Channel(int, name="numbers", capacity=64)
    async with wired() as owner:
        first, second = await owner.join("a"), await owner.join("b")
        counts = {"a": 0, "b": 0}

        async def consume(name: str, receiver: Receiver[int]) -> None:
            last = -1
            async for number in receiver:
                assert number > last
                last = number
                counts[name] += 1
                await asyncio.sleep(0)

        tasks = [
            asyncio.create_task(consume("a", owner.receiver(channel, first))),
            asyncio.create_task(consume("b", owner.receiver(channel, second))),
        ]
        with channel.sender as sender:
            for number in range(1500):
                await sender.put(number)
        await asyncio.gather(*tasks)
        assert counts["a"] + counts["b"] == 1500
        assert min(counts.values()) >= 0.8 * max(counts.values())
        for connection in (first, second):
            connection.close()


async def test_a_batch_and_a_lease_take_what_came_ahead_first() -> None:
    channel = Channel(int, name="numbers")
    async with ahead(channel) as (_, receiver):
        assert await receiver.get_batch(weight=2) == [3, 4]
        assert [await receiver.get() for _ in range(4)] == [5, 6, 7, 8]
        async with receiver.lease(weight=2) as taken:
            assert list(taken) == [9, 10]
            assert taken.deliveries == [1, 1]
        assert await receiver.get() == 11


async def test_closing_a_receiver_gives_back_what_came_ahead() -> None:
    channel = Channel(int, name="numbers")
    async with ahead(channel) as (_, receiver):
        receiver.close()
        await settled()
        assert statistics_of(channel.queue).prefetched == 0
        assert await channel.receiver.get_batch(weight=37) == list(range(3, 40))


async def test_a_lost_process_gives_back_what_came_ahead_in_order() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        for number in range(40):
            channel.sender.put_nowait(number)
        got = [await receiver.get() for _ in range(5)]
        await settled()
        assert statistics_of(channel.queue).prefetched > 0
        connection.abort("a test")
        await until(lambda: not owner.server.connections)
        with pytest.raises(ConnectionLost):
            await receiver.get()
        seen = statistics_of(channel.queue)
        assert (seen.prefetched, seen.depth, seen.gets) == (0, 35, 5)
        assert got == [0, 1, 2, 3, 4]
        assert await channel.receiver.get_batch(weight=35) == list(range(5, 40))


async def test_a_failed_channel_delivers_nothing_that_came_ahead() -> None:
    channel = Channel(int, name="numbers")
    async with ahead(channel) as (_, receiver):
        channel.fail("the simulator diverged")
        await settled()
        with pytest.raises(ChannelFailed, match="diverged"):
            await receiver.get()


async def test_the_end_comes_after_what_came_ahead() -> None:
    channel = Channel(int, name="numbers")
    async with ahead(channel) as (sender, receiver):
        sender.close()
        channel.close()
        assert [number async for number in receiver] == list(range(3, 40))


async def test_another_receiver_does_not_see_the_end_before_what_came_ahead_is_taken() -> None:
    channel = Channel(int, name="numbers")
    async with ahead(channel) as (sender, _):
        sender.close()
        rest = [number async for number in channel.receiver]
        assert rest[0] >= 3
        assert len(rest) == 37
        with pytest.raises(EndOfChannel):
            await channel.receiver.get()


async def test_an_item_that_came_ahead_and_cannot_be_read_is_buried_alone() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, receiver):
        liar: Any = sender
        liar._wire.fits = anything_fits
        for item in (0, 1, 2, 3, "text", 5, 6):
            await liar.put(item)
        assert [await receiver.get() for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(MalformedFrame, match=r"'numbers' of owner: .* not a int"):
            await receiver.get()
        assert [await receiver.get() for _ in range(2)] == [5, 6]
        await settled()
        assert len(channel.dead_letters) == 1
        assert statistics_of(channel.queue).depth == 0


async def test_a_large_item_is_not_sent_ahead() -> None:
    channel: Channel[NDArray[np.float64]] = Channel(NDArray[np.float64], name="arrays")
    async with remote_pair(channel) as (_, receiver):
        for number in range(6):
            channel.sender.put_nowait(np.full(10_000, float(number)))
        for number in range(6):
            assert (await receiver.get())[0] == number
            assert statistics_of(channel.queue).prefetched == 0


async def test_keys_have_windows_of_their_own_and_are_forgotten() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, receiver):
        for number in range(20):
            for key in ("a", "b"):
                await sender.put(number, key=key)
        for number in range(20):
            for key in ("a", "b"):
                assert await receiver.get(key=key) == number
        await sender.flush()
        for number in range(receiving.MAX_LINKS + 10):
            await sender.put(number, key=number)
            assert await receiver.get(key=number) == number
        end: Any = receiver
        assert len(end._links._links) <= receiving.MAX_LINKS
        await settled()
        assert all(queue.credit_holders for queue in channel.queue.keys.values())


async def churn(receiver: Receiver[int], channel: Channel[int], count: int = 8) -> None:
    """Get once under each of more keys than are remembered."""
    for number in range(count):
        await channel.sender.put(number, key=number)
        assert await receiver.get(key=number) == number


async def test_what_a_receiver_without_keys_has_ahead_is_found_after_many_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "MAX_LINKS", 2)
    channel, keyed = Channel(int, name="numbers"), Channel(int, name="by key")
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        await churn(owner.receiver(keyed, connection), keyed)
        for number in range(40):
            await channel.sender.put(number)
        got = [await receiver.get() for _ in range(3)]
        await settled()
        assert statistics_of(channel.queue).prefetched > 0
        got.append(await asyncio.wait_for(channel.receiver.get(), PATIENCE))
        assert statistics_of(channel.queue).prefetched == 0
        got += [await receiver.get() for _ in range(5)]
        await settled()
        connection.abort("a test")
        await until(lambda: not owner.server.connections)
        with pytest.raises(ConnectionLost):
            await receiver.get()
        got += await channel.receiver.get_batch(weight=40 - len(got))
        assert got == list(range(40))


@pytest.mark.parametrize("key", [None, "env"])
async def test_a_window_forgotten_while_its_receiver_gives_others_a_turn_is_found_again(
    monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.setattr(receiving, "MAX_LINKS", 2)
    channel, keyed = Channel(int, name="numbers"), Channel(int, name="by key")
    async with wired() as owner:
        connection = await owner.join()
        receiver, other = owner.receiver(channel, connection), owner.receiver(keyed, connection)
        for number in range(3):
            await channel.sender.put(number, key=key)
            assert await receiver.get(key=key) == number
        await settled()
        monkeypatch.setattr("rlinf_async.channels.wire.receiving.TURN_ITEMS", 1)
        getting: Any = receiver.get(key=key)
        getting.send(None)  # it lets others have a turn
        monkeypatch.setattr("rlinf_async.channels.wire.receiving.TURN_ITEMS", 128)
        await churn(other, keyed)
        for number in range(3, 43):
            await channel.sender.put(number, key=key)
        assert await asyncio.create_task(getting) == 3
        await settled()
        assert await asyncio.wait_for(channel.receiver.get(key=key), PATIENCE) == 4
        assert [await receiver.get(key=key) for _ in range(38)] == list(range(5, 43))
        connection.close()


@pytest.mark.parametrize("turns", range(14))
async def test_gets_cancelled_at_any_point_lose_nothing_and_keep_the_order(turns: int) -> None:
    channel = Channel(int, name="numbers")
    async with ahead(channel) as (_, receiver):
        got: list[int] = []

        async def consume() -> None:
            while True:
                got.append(await receiver.get())
                await asyncio.sleep(0)

        consuming = asyncio.create_task(consume())
        for _ in range(turns):
            await asyncio.sleep(0)
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
        rest = await channel.receiver.get_batch(weight=37 - len(got))
        assert got + rest == list(range(3, 40))


async def test_gets_of_many_tasks_are_served_in_arrival_order() -> None:
    channel = Channel(int, name="numbers")
    async with ahead(channel, 10) as (sender, receiver):
        tasks = [asyncio.create_task(receiver.get()) for _ in range(20)]
        await settled()
        for number in range(10, 23):
            await sender.put(number)
        assert await asyncio.gather(*tasks) == list(range(3, 23))


async def test_a_receiver_closed_while_items_are_under_way_leaves_them_to_others() -> None:
    channel = Channel(int, name="numbers")
    async with ahead(channel) as (_, receiver):
        other = receiver.clone()
        mine = [asyncio.create_task(receiver.get()) for _ in range(30)]
        await asyncio.sleep(0)
        receiver.close()
        done = await asyncio.gather(*mine, return_exceptions=True)
        got = [one for one in done if isinstance(one, int)]
        assert all(isinstance(one, (int, ChannelClosed)) for one in done)
        rest = await other.get_batch(weight=37 - len(got))
        assert sorted(got + rest) == list(range(3, 40))
        other.close()


# ---- recalled


async def test_a_process_that_stands_still_with_items_ahead_holds_up_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner_deliveries, "RECALL_SECONDS", 0.01)
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        for number in range(40):
            channel.sender.put_nowait(number)
        assert [await receiver.get() for _ in range(3)] == [0, 1, 2]
        await settled()
        ahead = statistics_of(channel.queue).prefetched
        assert ahead > 0
        transport = connection.transport
        assert transport is not None
        transport.pause_reading()  # it stands still: the recall is not heard
        assert await channel.receiver.get() == 3 + ahead  # what is behind them
        transport.resume_reading()
        await until(lambda: not statistics_of(channel.queue).prefetched)
        assert await channel.receiver.get() == 3  # they are back, as after a failed lease
        assert [await receiver.get() for _ in range(3)] == [4, 5, 6]
        connection.close()
        await connection.wait_closed()


async def test_gets_that_follow_one_another_on_one_end_are_not_overtaken_by_a_batch() -> None:
    channel = Channel(int, name="numbers", capacity=128)
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        for number in range(100):
            channel.sender.put_nowait(number)
        channel.close()
        got = [await receiver.get() for _ in range(13)]  # more are asked for in passing
        got += await receiver.get_batch(weight=1)
        got.append(await receiver.get())
        async with receiver.lease(weight=3) as leased:
            got += leased
        assert got == list(range(18))
        got += await receiver.get_batch(weight=400)
        assert got == list(range(100))
        with pytest.raises(EndOfChannel):
            await receiver.get_batch(weight=400)
        connection.close()
        await connection.wait_closed()


# ---- everything at once


class Party:
    """Processes that put and take in a seeded order, with cancellations and broken leases.

    In a ``gentle`` one nothing that was taken goes back: each receiver sees every key in order.
    """

    def __init__(self, owner: Wired, rng: Random, *, gentle: bool) -> None:
        self.owner = owner
        self.rng = rng
        self.gentle = gentle
        self.channel = Channel(int, name="numbers", capacity=rng.randint(1, 40), max_deliveries=999)
        self.taken: dict[str, list[int]] = {}

    async def produce(self, first: int, count: int) -> None:
        connection = await self.owner.join(f"producer {first}")
        sender = self.owner.sender(self.channel, connection)
        for number in range(first, first + count):
            await sender.put(number)
            if self.rng.random() < 0.1:
                await asyncio.sleep(0)
        sender.close()
        connection.close()
        await connection.wait_closed()

    async def consume(self, name: str) -> None:
        connection = await self.owner.join(name)
        receiver = self.owner.receiver(self.channel, connection, name)
        taken = self.taken[name] = []
        try:
            while True:
                await self._take(receiver, taken)
        except EndOfChannel:
            receiver.close()
            connection.close()
            await connection.wait_closed()

    async def _take(self, receiver: Receiver[int], taken: list[int]) -> None:
        choice = self.rng.random() * (0.8 if self.gentle else 1.0)
        if choice < 0.7:
            for _ in range(self.rng.randint(1, 30)):
                taken.append(await receiver.get())  # noqa: PERF401 - the end comes in between
        elif choice < 0.8:
            taken += await receiver.get_batch(weight=self.rng.randint(1, 5), at_least=1)
        elif choice < 0.9:
            with contextlib.suppress(LookupError):
                async with receiver.lease(weight=3, at_least=1) as leased:
                    if self.rng.random() < 0.5:
                        raise LookupError("the holder breaks")
                    taken += leased
        else:
            await self._get_and_cancel(receiver, taken)

    async def _get_and_cancel(self, receiver: Receiver[int], taken: list[int]) -> None:
        getting = asyncio.create_task(receiver.get())
        for _ in range(self.rng.randrange(8)):
            await asyncio.sleep(0)
        getting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            taken.append(await getting)


@pytest.mark.parametrize("seed", range(25))
async def test_every_item_is_taken_once_whatever_is_cancelled_leased_or_given_back(
    seed: int,
) -> None:
    async with wired() as owner:
        party = Party(owner, Random(seed), gentle=seed % 2 == 0)
        ends = party.channel.sender.clone("until all have begun")
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            for name in ("a", "b", "c"):
                group.create_task(party.consume(name))
            await asyncio.gather(*(party.produce(at, 150) for at in (0, 1000)))
            ends.close()
        assert sorted(chain(*party.taken.values())) == [*range(150), *range(1000, 1150)]
        seen = statistics_of(party.channel.queue)
        assert (seen.prefetched, seen.depth, seen.leases_out) == (0, 0, 0)
        assert seen.puts == seen.gets == 300
        nothing_left_waiting(party.channel)
        for taken in party.taken.values() if party.gentle else ():
            for producer in (0, 1):
                mine = [number for number in taken if number // 1000 == producer]
                assert mine == sorted(mine)


async def test_a_get_whose_answer_cannot_be_read_is_told_and_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(head: bytes) -> Any:
        raise MalformedFrame("2 items of 9 bytes were announced")

    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        monkeypatch.setattr(receiving, "_decode_delivered", wrong)
        await channel.sender.put(1)
        with pytest.raises(MalformedFrame, match="announced"):
            await receiver.get()
        assert connection.closed


async def test_a_get_says_what_was_taken_before_without_a_message_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notices: list[Any] = []
    took = owner_deliveries.taken

    def counted(request: Any) -> None:
        if request.kind == "delivery.taken":
            notices.append(request.meta)
        took(request)

    monkeypatch.setattr(owner_deliveries, "taken", counted)
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (_, receiver):

        async def consume() -> list[int]:
            return [await receiver.get() for _ in range(10)]

        consuming = asyncio.create_task(consume())
        for number in range(10):
            await until(lambda: channel.queue.unkeyed.getters)
            channel.sender.put_nowait(number)
        assert await consuming == [*range(10)]
        assert notices == []
        await settled()
        assert len(notices) == 1  # of the last one, which nothing is asked after


async def test_a_get_that_is_cancelled_before_it_is_sent_still_says_what_was_taken() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        channel.sender.put_nowait(1)
        assert await receiver.get() == 1
        connection.outbox.pause()
        getting: Any = receiver.get()
        getting.send(None)  # it asks, in the same turn
        assert connection.outbox.waiting == 1
        getting.close()
        assert connection.outbox.waiting == 2  # it, and behind it that it is cancelled
        connection.outbox.resume()
        await settled()
        [there] = owner.server.connections
        assert there.peer_requests.unsettled == {}  # the owner knows that the first was taken
        channel.sender.put_nowait(2)
        assert await receiver.get() == 2
