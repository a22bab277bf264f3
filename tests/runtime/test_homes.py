"""Channels whose queue lives with a worker: as others, but their items do not pass the driver."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.channels import HomeLost
from rlinf_async.runtime import deadlock
from rlinf_async.runtime.homes import HomedChannel
from tests.runtime.kit import NewCluster, Number, Reading

COUNT = 200
LOST = "the channel's queue was lost with its home, home[0]#0"
SIZE = 400_000
"""elements of an array that goes by shared memory"""


@pytest.fixture(params=[("local", "asyncio"), ("process", "uvloop")], ids="-".join)
def setting(request: pytest.FixtureRequest) -> tuple[str, str]:
    chosen: tuple[str, str] = request.param
    return chosen


class Counter(ra.Worker):
    """Puts numbers, and takes them."""

    async def put(self, numbers: ra.Sender[Number], count: int) -> None:
        for value in range(count):
            await numbers.put(Number(value))

    async def take(self, numbers: ra.Receiver[Number]) -> list[int]:
        return [number.value async for number in numbers]

    async def put_and_wait(
        self, numbers: ra.Sender[Number], count: int, answers: ra.Receiver[Number]
    ) -> int:
        """Close the sender, and only then wait for what its receiver does after the end."""
        with numbers:
            await self.put(numbers, count)
        return (await answers.get()).value

    async def take_and_answer(
        self, numbers: ra.Receiver[Number], answers: ra.Sender[Number]
    ) -> None:
        await answers.put(Number(len(await self.take(numbers))))

    async def put_arrays(self, readings: ra.Sender[Reading], count: int) -> None:
        for value in range(count):
            await readings.put(Reading(np.full(SIZE, value, np.float32), str(value)))

    async def take_arrays(self, readings: ra.Receiver[Reading]) -> list[float]:
        return [float(reading.values.sum()) / SIZE async for reading in readings]

    async def pid(self) -> int:
        return os.getpid()

    async def take_leased(self, numbers: ra.Receiver[Number], taken: ra.Sender[Number]) -> None:
        """Die in the middle of a lease, once."""
        while True:
            try:
                async with numbers.lease() as (number,):
                    if number.value == COUNT // 2 and not self.incarnation:
                        os.kill(os.getpid(), signal.SIGKILL)
                    await taken.put(number)
                    await taken.flush()
            except ra.EndOfChannel:
                return

    async def fails(self, numbers: ra.Sender[Number]) -> None:
        await numbers.put(Number(1))
        raise ValueError("no more")

    async def converse(self, hear: ra.Receiver[Number], say: ra.Sender[Number]) -> None:
        await say.put(await hear.get())


async def test_items_go_from_one_worker_to_another_wherever_the_queue_lives(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        producer = (await cluster.launch(Counter, name="producer"))[0]
        consumer = (await cluster.launch(Counter, name="consumer"))[0]
        other = (await cluster.launch(Counter, name="other"))[0]
        for home in (producer, consumer, other):
            numbers = await cluster.channel_at(home, Number, name=f"at {home.name}", capacity=7)
            assert numbers.home == home.name
            putting = producer.call(Counter.put, numbers.sender, COUNT)
            assert await consumer.call(Counter.take, numbers.receiver) == [*range(COUNT)]
            await putting
            seen = await numbers.statistics()
            assert (seen.puts, seen.gets, seen.depth) == (COUNT, COUNT, 0)
            assert (seen.senders, seen.receivers) == (0, 0)


async def test_how_full_a_key_is_can_be_asked_of_a_channel_with_a_worker(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        home = (await cluster.launch(Counter, name="home"))[0]
        numbers = await cluster.channel_at(home, Number, name="numbers", capacity=7)
        with numbers.sender as sender:
            await sender.put(Number(1), key="env", weight=3)
            await sender.flush()
            state = await numbers.state(key="env")
            assert (state.depth, state.weight, state.room) == (1, 3, 6)
            assert (await numbers.state()).room == 7
            with pytest.raises(TypeError, match="a key is a str or an int"):
                await numbers.state(key=1.5)  # type: ignore[arg-type]


async def test_arrays_go_by_shared_memory_and_the_driver_has_ends_too(
    new_cluster: NewCluster, setting: tuple[str, str]
) -> None:
    async with new_cluster() as cluster:
        home = (await cluster.launch(Counter, name="home"))[0]
        other = (await cluster.launch(Counter, name="other"))[0]
        readings = await cluster.channel_at(home, Reading, name="readings", capacity=2)
        putting = other.call(Counter.put_arrays, readings.sender, 5)
        assert await home.call(Counter.take_arrays, readings.receiver) == [0, 1, 2, 3, 4]
        await putting
        if setting[0] == "process":
            assert (await readings.statistics()).shared == 5
        numbers = await cluster.channel_at(home, Number, name="numbers")
        back = await cluster.channel_at(other, Number, name="back")
        taking = other.call(Counter.take, numbers.receiver)
        with numbers.sender as sender:
            for value in range(COUNT):
                await sender.put(Number(value))
        assert await taking == [*range(COUNT)]
        putting = home.call(Counter.put, back.sender, COUNT)
        with back.receiver as receiver:
            assert [number.value async for number in receiver] == [*range(COUNT)]
        await putting


async def test_a_sender_that_is_closed_within_a_call_ends_the_channel(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        home = (await cluster.launch(Counter, name="home"))[0]
        other = (await cluster.launch(Counter, name="other"))[0]
        for at, first, second in ((0, home, other), (1, other, home)):
            numbers = await cluster.channel_at(home, Number, name=f"numbers {at}")
            answers = await cluster.channel_at(home, Number, name=f"answers {at}")
            asking = first.call(Counter.put_and_wait, numbers.sender, 3, answers.receiver)
            await second.call(Counter.take_and_answer, numbers.receiver, answers.sender)
            assert await asking == 3


async def test_a_failed_call_fails_the_channel(new_cluster: NewCluster) -> None:
    async def graph() -> None:
        async with new_cluster() as cluster:
            home = (await cluster.launch(Counter, name="home"))[0]
            other = (await cluster.launch(Counter, name="other"))[0]
            numbers = await cluster.channel_at(home, Number, name="numbers")
            taking = home.call(Counter.take, numbers.receiver)
            failing = other.call(Counter.fails, numbers.sender)
            with pytest.raises(ra.WorkerError, match="channel 'numbers' failed"):
                await taking
            await failing

    with pytest.raises(ra.WorkerError, match="ValueError: no more"):
        await graph()


async def test_what_cannot_be_had_is_refused(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster, new_cluster() as another:
        worker = (await cluster.launch(Counter))[0]
        mortal = (await cluster.launch(Counter, name="mortal", restart=ra.Restart()))[0]
        await cluster.channel_at(worker, Number, name="numbers")
        with pytest.raises(ra.BuildError, match="there is a channel 'numbers' already"):
            cluster.channel(Number, name="numbers")
        with pytest.raises(ra.BuildError, match="there is a channel 'numbers' already"):
            await cluster.channel_at(worker, Number, name="numbers")
        with pytest.raises(ra.BuildError, match=r"cannot live with mortal\[0\], which is"):
            await cluster.channel_at(mortal, Number, name="more")
        with pytest.raises(ra.BuildError, match=r"Counter\[0\] is no worker of this cluster"):
            await another.channel_at(worker, Number, name="numbers")


@pytest.mark.parametrize("setting", [("process", "uvloop")], ids="-".join)
async def test_what_a_killed_worker_had_leased_is_delivered_again(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        home = (await cluster.launch(Counter, name="home"))[0]
        mortal = (await cluster.launch(Counter, name="mortal", restart=ra.Restart()))[0]
        numbers = await cluster.channel_at(home, Number, name="numbers")
        taken = await cluster.channel_at(home, Number, name="taken")
        putting = home.call(Counter.put, numbers.sender, COUNT)
        leasing = mortal.call(Counter.take_leased, numbers.receiver, taken.sender)
        assert sorted(await home.call(Counter.take, taken.receiver)) == [*range(COUNT)]
        await putting
        await leasing
        seen = await numbers.statistics()
        assert (seen.redelivered, seen.gets, seen.leases_out) == (1, COUNT, 0)


@pytest.mark.parametrize("setting", [("process", "uvloop")], ids="-".join)
async def test_with_its_home_a_channel_is_lost_and_every_use_says_so(
    new_cluster: NewCluster,
) -> None:
    lost: list[str] = []

    async def use(doing: Any) -> None:
        try:
            await doing
        except HomeLost as error:
            lost.append(str(error).partition(":")[0])

    async def error_of(call: Any) -> Exception:
        with pytest.raises(ra.WorkerError) as raised:
            await call
        return raised.value

    async def graph() -> None:
        async with new_cluster() as cluster:
            home = (await cluster.launch(Counter, name="home"))[0]
            other = (await cluster.launch(Counter, name="other"))[0]
            numbers = await cluster.channel_at(home, Number, name="numbers")
            pid = await home.call(Counter.pid)
            async with asyncio.TaskGroup() as group:
                serving = home.call(Counter.converse, numbers.receiver, numbers.sender)
                died = group.create_task(error_of(serving))  # awaited, it does not end the cluster
                taking = other.call(Counter.take, numbers.receiver)
                failed = group.create_task(error_of(taking))
                group.create_task(use(numbers.receiver.get()))
                while (await numbers.statistics()).waiting_getters < 3:
                    pass
                os.kill(pid, signal.SIGKILL)
            await use(numbers.sender.put(Number(1)))
            await use(numbers.statistics())
            assert f"HomeLost: {LOST}" in str(failed.result())
            raise died.result()

    with pytest.raises(ra.WorkerDied) as raised:
        await graph()
    assert raised.value.worker == "home[0]"
    assert lost == [LOST] * 3


@pytest.mark.parametrize("setting", [("process", "uvloop")], ids="-".join)
async def test_a_ring_of_waits_over_homes_is_a_deadlock(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlock, "PERIOD", 0.05)

    async def graph() -> None:
        async with new_cluster(deadlock_after=0.3) as cluster:
            one = (await cluster.launch(Counter, name="one"))[0]
            two = (await cluster.launch(Counter, name="two"))[0]
            there: HomedChannel[Number] = await cluster.channel_at(one, Number, name="there")
            back = await cluster.channel_at(two, Number, name="back")
            await asyncio.gather(
                one.call(Counter.converse, there.receiver, back.sender),
                two.call(Counter.converse, back.receiver, there.sender),
            )

    with pytest.raises(ra.Deadlock) as raised:
        await graph()
    said = str(raised.value)
    assert "nobody can go on:" in said
    assert "one[0].converse has waited" in said
    assert "to get on channel 'there'; only two[0].converse can end this wait" in said
    assert "to get on channel 'back'; only one[0].converse can end this wait" in said
