"""Calls: what ranks are given, what comes back, and whose ends are closed when."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.channels import ChannelClosed
from rlinf_async.channels.queue import statistics_of
from tests.runtime.kit import Doubler, NewCluster, Number, Reading, Teller, Waiter


async def test_a_call_gives_one_result_per_rank_in_rank_order(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        tellers = await cluster.launch(Teller, count=3)
        assert len(tellers) == 3
        assert await tellers.call(Teller.where) == [(0, 3), (1, 3), (2, 3)]


async def test_call_on_runs_on_these_ranks_in_this_order(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        tellers = await cluster.launch(Teller, count=3)
        assert await tellers.call_on([2, 0], Teller.where) == [(2, 3), (0, 3)]
        assert await tellers.call_on([], Teller.where) == []
        assert await tellers[1].call(Teller.where) == (1, 3)
        with pytest.raises(ra.BuildError, match=r"Teller has ranks 0 to 2, not \[3\]"):
            tellers.call_on([0, 3], Teller.where)
        with pytest.raises(IndexError, match="Teller has ranks 0 to 2, not 3"):
            tellers[3]


async def test_a_single_worker_gives_the_result_itself(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        teller = (await cluster.launch(Teller, "good day", name="one"))[0]
        assert teller.name == "one[0]"
        assert await teller.call(Teller.greet, "Ada") == "good day Ada!"
        assert await teller.group.call(Teller.greet, "Ada") == ["good day Ada!"]


async def test_arguments_go_by_position_by_name_and_by_default(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        teller = (await cluster.launch(Teller, "good morning", name="polite"))[0]
        assert teller.name == "polite[0]"
        assert await teller.call(Teller.greet, "Ada") == "good morning Ada!"
        assert await teller.call(Teller.greet, mark="?", name="Ada") == "good morning Ada?"
        by_name = await cluster.launch(Teller, greeting="bye")
        assert await by_name.call(Teller.greet, "Ada") == ["bye Ada!"]


async def test_results_are_structs_arrays_and_none(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        tellers = await cluster.launch(Teller, count=2)
        first, second = await tellers.call(Teller.reading, 50_000)
        assert isinstance(first, Reading)
        assert second.label == "rank 1"
        np.testing.assert_array_equal(second.values, np.arange(50_000, dtype=np.float32) + 1)
        assert await tellers[0].call(Teller.sum_of, Reading(np.ones(7), "ones")) == 7.0
        assert await tellers.call(Teller.nothing) == [None, None]


async def test_the_last_producer_to_return_ends_the_channel(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        numbers = cluster.channel(Number, name="numbers", capacity=4)
        doubled = cluster.channel(Number, name="doubled", capacity=4)
        doublers = await cluster.launch(Doubler, count=2)
        running = doublers.call(Doubler.run, numbers.receiver, doubled.sender)
        feeding = cluster.channel(Number, name="unused")
        assert statistics_of(feeding.queue).senders == 0
        with numbers.sender as sender:
            for value in range(4):
                await sender.put(Number(value))
        got = sorted([number.value async for number in doubled.receiver])
        assert got == [0, 2, 4, 6]
        assert sum(await running) == 4
        assert statistics_of(numbers.queue).receivers == statistics_of(doubled.queue).senders == 0


async def test_one_call_ends_while_another_goes_on(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        first = cluster.channel(Number, name="first")
        second = cluster.channel(Number, name="second")
        doubled = cluster.channel(Number, name="doubled")
        doubler = (await cluster.launch(Doubler))[0]
        one = doubler.call(Doubler.run, first.receiver, doubled.sender)
        two = doubler.call(Doubler.run, second.receiver, doubled.sender)
        first.sender.open().close()
        assert await one == 0
        assert not two.done()
        with second.sender as sender:
            await sender.put(Number(5))
        assert await doubled.receiver.get() == Number(10)
        assert await two == 1
        with pytest.raises(ra.EndOfChannel):
            await doubled.receiver.get()


class Fan(ra.Worker):
    """Takes ends inside lists and dicts."""

    async def out(self, numbers: ra.Receiver[Number], to: list[ra.Sender[Number]]) -> None:
        async for number in numbers:
            await to[number.value % len(to)].put(number)

    async def named(self, to: dict[str, ra.Sender[Number]], maybe: ra.Sender[Number] | None) -> str:
        await to["b"].put(Number(7))
        return "none" if maybe is None else maybe.channel_name


async def test_ends_travel_inside_lists_and_dicts(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        numbers = cluster.channel(Number, name="numbers")
        even, odd = (cluster.channel(Number, name=name) for name in ("even", "odd"))
        fan = (await cluster.launch(Fan))[0]
        running = fan.call(Fan.out, numbers.receiver, [even.sender, odd.sender])
        with numbers.sender as sender:
            for value in range(4):
                await sender.put(Number(value))
        assert [number.value async for number in even.receiver] == [0, 2]
        assert [number.value async for number in odd.receiver] == [1, 3]
        await running
        late = cluster.channel(Number, name="late")
        assert await fan.call(Fan.named, {"b": late.sender}, None) == "none"
        with late.sender.clone() as clone:
            assert await fan.call(Fan.named, {"b": clone}, late.sender) == "late"
        assert [await late.receiver.get(), await late.receiver.get()] == [Number(7)] * 2


async def test_a_failed_clone_leaves_no_end_open(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        numbers = cluster.channel(Number, name="numbers")
        doubled = cluster.channel(Number, name="doubled")
        doublers = await cluster.launch(Doubler, count=2)
        doubled.close()
        with pytest.raises(ChannelClosed, match="'doubled' was closed"):
            doublers.call(Doubler.run, numbers.receiver, doubled.sender)
        assert statistics_of(numbers.queue).receivers == 0


async def test_two_clusters_live_side_by_side(new_cluster: NewCluster) -> None:
    async with new_cluster() as one, new_cluster() as two:
        first = await one.launch(Teller, "one")
        second = await two.launch(Teller, "two")
        assert await first.call(Teller.greet, "x") == ["one x!"]
        assert await second.call(Teller.greet, "x") == ["two x!"]


async def test_a_cluster_is_entered_once_and_used_only_inside(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    with pytest.raises(ra.BuildError, match="enter the cluster first"):
        await cluster.launch(Teller)
    async with cluster:
        tellers = await cluster.launch(Teller)
    with pytest.raises(RuntimeError, match="can be entered once"):
        await cluster.__aenter__()
    with pytest.raises(ra.BuildError, match=r"Teller\.where: the cluster of this group has been"):
        tellers.call(Teller.where)
    with pytest.raises(ra.BuildError, match="this cluster has been left"):
        await cluster.launch(Teller, name="again")


async def test_a_cluster_that_is_never_entered_leaves_nothing(new_cluster: NewCluster) -> None:
    assert new_cluster().groups == {}


async def test_devices_reach_the_ranks(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        tellers = await cluster.launch(Teller, count=2, placement=ra.Packed(devices=2))
        assert await tellers.call(Teller.where_it_runs) == [["cpu:0", "cpu:0"]] * 2


async def test_a_call_makes_one_task_where_its_method_runs_and_none_elsewhere(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        numbers = cluster.channel(Number, name="numbers")
        waiter = (await cluster.launch(Waiter))[0]
        before = asyncio.all_tasks()
        running = waiter.call(Waiter.for_item, numbers.receiver)
        made = asyncio.all_tasks() - before
        with numbers.sender as sender:
            await sender.put(Number(7))
        assert await running == 7
        here = cluster.pid(waiter.name) is None
        assert [task.get_name() for task in made] == ["Waiter[0].for_item"] * here


async def test_calls_that_are_over_leave_nothing_to_the_garbage_collector(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        teller = (await cluster.launch(Teller))[0]
        for _ in range(3):
            await teller.call(Teller.greet, "you")
        gc.collect()
        gc.disable()
        try:
            for _ in range(100):
                await teller.call(Teller.greet, "you")
            assert gc.collect() < 100
        finally:
            gc.enable()
