"""The recorders find what they look for, and name it."""

import asyncio

import pytest

from rlinf_async.channels import Channel
from rlinf_async.channels.queue import statistics_of
from rlinf_async.testing import (
    Bounds,
    ExactlyOnce,
    InvariantBroken,
    OrderPerKey,
    explore,
    no_tasks_left,
    nothing_left_waiting,
    run,
    wait_all_blocked,
)


def test_a_dataflow_that_keeps_its_promises_passes_every_check_on_every_seed() -> None:
    async def main() -> None:
        numbers = Channel(int, name="numbers", capacity=2)
        once, order = ExactlyOnce[int](), OrderPerKey[int](key=lambda number: number % 2)
        bounds = Bounds(4)  # two items for each of the two keys

        async def consume(key: int) -> None:
            for _ in range(5):
                number = await numbers.receiver.get(key=key)
                once.received(number)
                order.received(number)
                bounds.saw(statistics_of(numbers.queue).depth)

        async with asyncio.TaskGroup() as group:
            for key in (0, 1):
                group.create_task(consume(key))
            for number in range(10):
                once.sent(number)
                order.sent(number)
                await numbers.sender.put(number, key=number % 2)
        once.check()
        order.check()
        bounds.check()
        nothing_left_waiting(numbers)
        no_tasks_left()

    explore(main)


def test_lost_doubled_and_unknown_items_are_named() -> None:
    once = ExactlyOnce[str]()
    for item in "abcd":
        once.sent(item)
    for item in "abbz":
        once.received(item)
    with pytest.raises(InvariantBroken) as caught:
        once.check()
    assert str(caught.value).splitlines() == [
        "broken: 4 items were sent, exactly once each",
        "lost: 'c', 'd'",
        "received more often than sent: 'b'",
        "received but never sent: 'z'",
    ]


def test_a_long_list_of_items_is_cut() -> None:
    once = ExactlyOnce[int]()
    for item in range(25):
        once.sent(item)
    with pytest.raises(InvariantBroken, match=r"lost: 0, .*, 9 and 15 more"):
        once.check()


def test_items_without_a_hash_are_told_apart_by_identity() -> None:
    once = ExactlyOnce[list[int]](identity=tuple)
    once.sent([1])
    once.received([1])
    once.check()


def test_an_item_that_comes_after_a_later_one_is_named_with_its_key() -> None:
    order = OrderPerKey[tuple[str, int]](key=lambda item: item[0])
    for item in [("a", 1), ("b", 1), ("a", 2)]:
        order.sent(item)
    for item in [("b", 1), ("a", 2), ("a", 1)]:
        order.received(item)
    with pytest.raises(InvariantBroken, match=r"key 'a': \('a', 1\) came after a later item"):
        order.check()


def test_an_item_that_is_missing_does_not_break_the_order() -> None:
    order = OrderPerKey[int](key=lambda _: None)
    for item in (1, 2, 3):
        order.sent(item)
    for item in (1, 3):
        order.received(item)
    order.check()


def test_the_item_that_passes_the_bound_is_named() -> None:
    bounds = Bounds(2, receivers=1)
    for item in "abcd":
        bounds.sent(item)
    with pytest.raises(InvariantBroken, match="'d' was let in as number 4, where at most 3 fit"):
        bounds.check()
    assert bounds.most == 4


def test_an_item_received_before_it_was_sent_is_named() -> None:
    bounds = Bounds(2, senders=1)
    for item in "ab":
        bounds.received(item)
    with pytest.raises(InvariantBroken, match="'b' was received before it can have been sent"):
        bounds.check()


def test_a_depth_beyond_the_capacity_is_named() -> None:
    bounds = Bounds(2)
    bounds.saw(3)
    with pytest.raises(InvariantBroken, match="a depth of 3 was seen"):
        bounds.check()


def test_items_leases_and_waits_left_in_a_channel_are_named() -> None:
    async def main() -> None:
        full = Channel(int, name="full", capacity=4)
        empty = Channel(int, name="empty", capacity=4)
        for number in (1, 2):
            await full.sender.put(number)
        waiting = asyncio.create_task(empty.receiver.get())
        async with full.receiver.lease():
            await wait_all_blocked()
            with pytest.raises(InvariantBroken) as caught:
                nothing_left_waiting(full, empty)
        waiting.cancel()
        report = str(caught.value)
        assert "channel 'full' still holds 1 items" in report
        assert "channel 'full' has 1 items out on lease" in report
        assert "to get on channel 'empty'" in report

    run(main())


def test_a_task_that_is_left_is_named() -> None:
    async def main() -> None:
        forgotten = asyncio.create_task(asyncio.Event().wait(), name="forgotten")
        await wait_all_blocked()
        with pytest.raises(InvariantBroken, match="1 tasks have not finished:\n  forgotten stands"):
            no_tasks_left()
        forgotten.cancel()

    run(main())
