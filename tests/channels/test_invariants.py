"""The queue's invariants, by name, over random programs and schedules."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from rlinf_async.channels import Channel, ChannelError, EndOfChannel, Lease, current_party
from rlinf_async.testing import (
    ExactlyOnce,
    InvariantBroken,
    OrderPerKey,
    explore,
    nothing_left_waiting,
    run,
)
from tests.channels.programs import KEYS, Program, seeded

SEEDS = range(300)
of_both_kinds = pytest.mark.parametrize("stealing", [False, True], ids=["keyed", "stealing"])


@of_both_kinds
def test_an_item_is_in_exactly_one_place(stealing: bool) -> None:
    async def main() -> None:
        program = Program(seeded(), stealing=stealing)
        await program.run(steps=40)
        await program.finish()
        places = program.places()
        assert max(places.values(), default=1) == 1
        for task, item in program.puts.items():
            assert task.cancelled() or places[item] == 1
        nothing_left_waiting(program.channel)

    explore(main, seeds=SEEDS)


def test_the_order_is_fifo_for_each_key_and_whoever_waits_is_served_in_arrival_order() -> None:
    explore(one_producer_and_one_consumer_for_each_key, seeds=SEEDS)


async def one_producer_and_one_consumer_for_each_key() -> None:
    rng = seeded()
    channel = Channel(int, name="numbers", capacity=rng.randint(1, 3))
    order: OrderPerKey[int] = OrderPerKey(lambda item: item % len(KEYS))
    once: ExactlyOnce[int] = ExactlyOnce()

    async def produce() -> None:
        with channel.sender.clone() as sender:
            for item in range(24):
                order.sent(item)
                once.sent(item)
                await sender.put(item, key=KEYS[item % len(KEYS)])

    async def consume(rank: int) -> None:
        current_party.set(f"consumer {rank}")
        with channel.receiver.clone() as receiver:
            while True:
                try:
                    await consume_some(receiver.lease(weight=rng.randint(1, 3), key=KEYS[rank]))
                except EndOfChannel:
                    return
                except RuntimeError:
                    continue

    async def consume_some(lease: AbstractAsyncContextManager[Lease[int]]) -> None:
        async with lease as batch:
            await asyncio.sleep(0)
            if rng.random() < 0.3:
                raise RuntimeError("broken")
            for item in batch:
                order.received(item)
                once.received(item)

    channel.queue.max_deliveries = 1_000
    async with asyncio.TaskGroup() as group:
        for rank in range(len(KEYS)):
            group.create_task(consume(rank))
        group.create_task(produce())
    order.check()
    once.check()
    nothing_left_waiting(channel)


@of_both_kinds
def test_no_wakeup_is_lost(stealing: bool) -> None:
    """Every quiet moment of a program is looked at: nobody waits beside an item or beside room."""

    async def main() -> None:
        program = Program(seeded(), stealing=stealing)
        await program.run(steps=40)
        await program.finish()

    explore(main, seeds=SEEDS)


@of_both_kinds
def test_a_lane_admits_at_most_its_capacity_and_weight(stealing: bool) -> None:
    async def main() -> None:
        program = Program(seeded(), gentle=True, stealing=stealing)
        await program.run(steps=60)
        await program.finish()

    explore(main, seeds=SEEDS)


@of_both_kinds
@pytest.mark.parametrize("ending", ["close", "fail", "receiver", "sender"])
def test_whoever_waits_when_the_channel_ends_is_told(ending: str, stealing: bool) -> None:
    async def main() -> None:
        program = Program(seeded(), stealing=stealing)
        await program.run(steps=30)
        end = {
            "close": program.channel.close,
            "fail": lambda: program.channel.fail("broken"),
            "receiver": program.receiver.close,
            "sender": program.sender.close,
        }[ending]
        waiting = [*program.takes, *program.puts]
        end()
        program.end_leases()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert result is None or isinstance(result, ChannelError | asyncio.CancelledError)
        assert program.channel.waits() == []

    explore(main, seeds=range(100))


def test_the_checker_sees_an_item_that_was_lost() -> None:
    async def main() -> None:
        program = Program(seeded())
        await program.sender.put(0)
        program.puts[asyncio.create_task(asyncio.sleep(0))] = 0
        program.check()
        program.channel.queue.unkeyed.entries.clear()
        program.check()

    with pytest.raises(InvariantBroken, match="item 0 is in 0 places"):
        run(main())


def test_the_checker_sees_a_wakeup_that_was_lost() -> None:
    async def main() -> None:
        program = Program(seeded())
        waiting = asyncio.create_task(program.receiver.get())
        await asyncio.sleep(1)
        [getter] = program.channel.queue.unkeyed.getters.drop_all()
        await program.sender.put(0)
        program.channel.queue.unkeyed.getters.add(getter)
        program.puts[asyncio.create_task(asyncio.sleep(0))] = 0
        try:
            program.check()
        finally:
            waiting.cancel()

    with pytest.raises(InvariantBroken, match="a get waits although items rest"):
        run(main())
