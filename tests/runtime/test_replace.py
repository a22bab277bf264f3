"""The workers of a group are replaced while the graph runs: nothing is lost, nothing doubled."""

# ruff: noqa: PT012  (it is leaving the cluster that raises)

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

import rlinf_async as ra
from rlinf_async.channels.queue import statistics_of
from rlinf_async.runtime import Restart, deadlock
from rlinf_async.runtime.supervise import WorkerSpec
from rlinf_async.testing import ExactlyOnce, explore, run, wait_all_blocked
from rlinf_async.workers.base import BuildError, Device, WorkerError
from tests.runtime.kit import Doubler, NewCluster, Number, Teller, Word, kill
from tests.runtime.mortal import Mortal, MortalBackend


class Tripler(ra.Worker):
    """Stands in for a `Doubler`, and is told what to add."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    async def run(self, numbers: ra.Receiver[Number], doubled: ra.Sender[Number]) -> int:
        count = 0
        async for number in numbers:
            await doubled.put(Number(number.value * 3 + self.offset))
            count += 1
        return count

    async def leased(self, numbers: ra.Receiver[Number], doubled: ra.Sender[Number]) -> None:
        with suppress(ra.EndOfChannel):
            while True:
                async with numbers.lease() as (number,):
                    await doubled.put(Number(number.value * 3 + self.offset))

    async def life(self) -> int:
        return self.incarnation


class NoSuchRobot(Tripler):
    """Cannot be set up."""

    async def setup(self) -> None:
        raise RuntimeError("no such robot")


class Without(ra.Worker):
    """Has other methods."""

    async def other(self) -> None: ...

    async def leased(self, numbers: ra.Receiver[Word]) -> None: ...


class Holder(ra.Worker):
    """Holds what it has leased until it is told to let go."""

    def __init__(self, name: str) -> None:
        self.called = name

    async def run(
        self, numbers: ra.Receiver[Number], go: ra.Receiver[int], out: ra.Sender[Word]
    ) -> None:
        await out.put(Word(f"{self.called} begins"))
        with suppress(ra.EndOfChannel):
            while True:
                async with numbers.lease() as (number,):
                    await out.put(Word(f"{self.called} has {number.value}"))
                    await go.get()
                    await out.put(Word(f"{self.called} did {number.value}"))


async def leaving(workers: ra.WorkerGroup[Any]) -> None:
    """Wait until calls leave the first rank."""
    while workers.supervisors[0].left is None:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def text(words: ra.Receiver[Word]) -> str:
    return (await words.get()).text


async def test_what_is_leased_is_finished_and_the_next_item_is_the_new_workers(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        numbers = cluster.channel(Number, name="numbers")
        go = cluster.channel(int, name="go")
        out = cluster.channel(Word, name="out")
        workers = await cluster.launch(Holder, "old", name="Holder")
        running = workers[0].call(Holder.run, numbers.receiver, go.receiver, out.sender)
        said = out.receiver
        with numbers.sender as sender, go.sender as let:
            await sender.put(Number(1))
            await sender.put(Number(2))
            assert [await text(said), await text(said)] == ["old begins", "old has 1"]
            replacing = asyncio.create_task(workers.replace(Holder, "new"))
            await leaving(workers)
            await let.put(0)
            assert [await text(said), await text(said)] == ["old did 1", "new begins"]
            assert await text(said) == "new has 2"
            await replacing
            await let.put(0)
            assert await text(said) == "new did 2"
        await running
        seen = statistics_of(numbers.queue)
        assert (seen.depth, seen.leases_out, seen.redelivered) == (0, 0, 0)
        assert (workers.replaced, workers.restarts) == (1, 0)


async def test_what_is_not_finished_in_time_goes_back(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        numbers = cluster.channel(Number, name="numbers")
        go = cluster.channel(int, name="go")
        out = cluster.channel(Word, name="out")
        workers = await cluster.launch(Holder, "old", name="Holder")
        running = workers[0].call(Holder.run, numbers.receiver, go.receiver, out.sender)
        said = out.receiver
        with numbers.sender as sender, go.sender as let:
            await sender.put(Number(1))
            assert [await text(said), await text(said)] == ["old begins", "old has 1"]
            await workers.replace(Holder, "new", finish=0.0)
            assert [await text(said), await text(said)] == ["new begins", "new has 1"]
            await let.put(0)
            assert await text(said) == "new did 1"
        await running
        assert statistics_of(numbers.queue).redelivered == 1


async def test_a_loop_of_gets_loses_nothing_either(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        numbers = cluster.channel(Number, name="numbers", capacity=4)
        doubled = cluster.channel(Number, name="doubled", capacity=4)
        workers = await cluster.launch(Doubler, count=2)
        running = workers.call(Doubler.run, numbers.receiver, doubled.sender)

        async def feed() -> None:
            with numbers.sender as sender:
                for value in range(300):
                    await sender.put(Number(value))

        found = set[int]()
        async with asyncio.TaskGroup() as group:
            group.create_task(feed())
            replacing = group.create_task(workers.replace(Tripler, 1000))
            async for number in doubled.receiver:
                value = (number.value - 1000) // 3 if number.value >= 1000 else number.value // 2
                assert value not in found
                found.add(value)
        await replacing
        await running
        assert found == set(range(300))


async def test_old_names_of_methods_stand_for_the_new_ones(new_cluster: NewCluster) -> None:
    class_before = Teller
    async with new_cluster() as cluster:
        tellers = await cluster.launch(Teller, "hello", count=2, restart=Restart())
        await tellers.replace(Politer, "good day")
        assert await tellers.call(class_before.greet, "you") == ["Good day, you!"] * 2
        assert await tellers.call(Teller.life) == [1, 1]
        await tellers.replace(Politer, "hi")
        assert await tellers[1].call(Teller.greet, "you") == "Hi, you!"


class Politer(Teller):
    """Greets as one should."""

    async def greet(self, name: str, mark: str = "!") -> str:
        return f"{self.greeting.capitalize()}, {name}{mark}"


async def test_a_successor_that_cannot_be_set_up_leaves_the_old_ones_at_work(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        numbers = cluster.channel(Number, name="numbers")
        doubled = cluster.channel(Number, name="doubled")
        workers = await cluster.launch(Doubler, count=2)
        running = workers.call(Doubler.leased, numbers.receiver, doubled.sender)
        with pytest.raises(WorkerError, match="no such robot"):
            await workers.replace(NoSuchRobot)
        with numbers.sender as sender:
            await sender.put(Number(21))
        assert (await doubled.receiver.get()).value == 42
        await running
        assert (workers.replaced, workers.worker_class) == (0, Doubler)


async def test_what_cannot_be_replaced_is_refused_before_anything_is_started(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        numbers = cluster.channel(Number, name="numbers")
        doubled = cluster.channel(Number, name="doubled")
        workers = await cluster.launch(Doubler)
        running = workers.call(Doubler.leased, numbers.receiver, doubled.sender)
        homed = await cluster.launch(Teller)
        refused: list[tuple[Callable[[], Awaitable[None]], str]] = [
            (lambda: workers.replace(Teller), "Teller has no method 'leased'"),
            (lambda: workers.replace(Without), "multiple values|unexpected|missing|got an"),
            (lambda: workers.replace(Tripler, 1, 2), "Tripler.__init__: too many"),
            (lambda: workers.replace(ra.Worker, finish=-1.0), "finish must be seconds from 0"),
            (lambda: workers.replace(Tripler, doubled.sender), "has an end of a channel"),
            (lambda: workers.replace(int), "takes a subclass of Worker"),  # type: ignore[arg-type]
            (lambda: homed.replace(Politer), "channel 'here' lives with it"),
        ]
        await cluster.channel_at(homed[0], Number, name="here")
        for what, why in refused:
            with pytest.raises(BuildError, match=why):
                await what()
        numbers.close()
        await running
    with pytest.raises(BuildError, match="has been left"):
        await workers.replace(Tripler)


def test_two_replacements_at_a_time_are_refused() -> None:
    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            workers = await cluster.launch(Teller, count=2)
            first = asyncio.create_task(workers.replace(Politer))
            await asyncio.sleep(0)
            with pytest.raises(BuildError, match="is being replaced already"):
                await workers.replace(Politer)
            await first
            assert workers.replaced == 2

    run(main())


# ---- deaths, cancellations, closes: in any order


async def replaced_at_any_time(backend: MortalBackend, swaps: int, kills: int) -> int:
    """Every number is doubled or tripled, once, though workers are replaced, and killed."""
    once = ExactlyOnce[int]()
    async with ra.Cluster(backend, devices=()) as cluster:
        numbers = cluster.channel(Number, name="numbers", capacity=3, max_deliveries=100)
        doubled = cluster.channel(Number, name="doubled", capacity=1)
        workers = await cluster.launch(Doubler, count=2, restart=Restart(max=kills + 1))
        running = workers.call(Doubler.leased, numbers.receiver, doubled.sender)

        async def feed() -> None:
            with numbers.sender as sender:
                for value in range(40):
                    once.sent(value)
                    await sender.put(Number(value))

        async def murder() -> None:
            for turn in range(kills):
                for _ in range(7 + 5 * turn):
                    await asyncio.sleep(0)
                backend.kill(f"Doubler[{turn % 2}]")

        async def swap() -> None:
            for turn in range(swaps):
                for _ in range(turn % 3):
                    await asyncio.sleep(0)
                with suppress(ra.WorkerDied):  # the successor was killed: it has not taken over
                    if turn % 2:
                        await workers.replace(Doubler)
                    else:
                        await workers.replace(Tripler, 10_000)

        async with asyncio.TaskGroup() as group:
            group.create_task(feed())
            group.create_task(murder())
            group.create_task(swap())
            seen = set[int]()
            async for number in doubled.receiver:
                tripled = number.value >= 10_000
                value = (number.value - 10_000) // 3 if tripled else number.value // 2
                if not kills or value not in seen:  # put, and killed before it was acknowledged
                    once.received(value)
                seen.add(value)
        await running
        assert statistics_of(numbers.queue).leases_out == 0
        assert not [one for one in workers.supervisors if one.left or one.is_exchanging]
    once.check()
    return workers.replaced


def test_nothing_is_lost_or_doubled_however_often_workers_are_replaced() -> None:
    done = explore(lambda: replaced_at_any_time(MortalBackend(), 12, 0), seeds=range(60))
    assert set(done) == {24}


def test_deaths_during_replacements_lose_nothing() -> None:
    done = explore(lambda: replaced_at_any_time(MortalBackend(), 8, 6), seeds=range(100))
    assert sum(done) > 500


class Counted(MortalBackend):
    """Knows all that it has started."""

    def alive(self) -> list[Mortal]:
        return [one for lives in self.lives.values() for one in lives]


async def left_at_any_time(backend: Counted, turns: int) -> None:
    """The cluster is left, or the call or the replacement cancelled, while workers are replaced."""
    async with ra.Cluster(backend, devices=()) as cluster:
        numbers = cluster.channel(Number, name="numbers")
        doubled = cluster.channel(Number, name="doubled")
        workers = await cluster.launch(Doubler, count=2, restart=Restart())
        running = workers.call(Doubler.leased, numbers.receiver, doubled.sender)
        with numbers.sender as sender:
            for value in range(10):
                await sender.put(Number(value))
            replacing = asyncio.create_task(workers.replace(Tripler))
            for _ in range(turns):
                await asyncio.sleep(0)
            match turns % 3:
                case 0:
                    running.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await running
                    await replacing
                    assert [one.spec.info.incarnation for one in workers.supervisors] == [1, 1]
                case 1:
                    replacing.cancel()
                    with suppress(asyncio.CancelledError):
                        await replacing
                    while any(  # noqa: ASYNC110
                        one.is_exchanging for one in workers.supervisors
                    ):
                        await asyncio.sleep(0)
                    await workers.replace(Tripler)
                    assert all(one.spec.cls is Tripler for one in workers.supervisors)
                    assert len([one for one in backend.alive() if not one.died.done()]) == 2
                case _:
                    pass
        if turns % 3 == 1:
            await running
    with suppress(asyncio.CancelledError, BuildError):
        await replacing
    assert not [one for one in backend.alive() if not one.died.done()]


def test_whatever_ends_a_replacement_leaves_no_worker_behind() -> None:
    for turns in range(30):
        explore(lambda turns=turns: left_at_any_time(Counted(), turns), seeds=range(5))  # type: ignore[misc]


class Program:
    """A random program: what it does to one group, and what became of its items."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.weights = WEIGHTS if seed % 2 else ORDERLY
        self.backend = Counted()
        self.sent = 0
        self.seen = Counter[int]()
        self.may_double = False
        """whether a call was ended between a put and its acknowledgement, perhaps"""
        self.swaps: list[asyncio.Task[None]] = []

    async def main(self) -> None:
        async with ra.Cluster(self.backend, devices=()) as cluster:
            numbers = cluster.channel(Number, name="numbers", max_deliveries=1000)
            doubled = cluster.channel(Number, name="doubled", capacity=2)
            self.group = await cluster.launch(Doubler, count=2, restart=Restart(max=1000))
            self.ends = numbers.receiver, doubled.sender
            reading = asyncio.create_task(self.read(doubled.receiver))
            with numbers.receiver, doubled.sender:
                self.running = self.group.call(Doubler.leased, *self.ends)
                with numbers.sender as sender:
                    for _ in range(60):
                        await self.step(sender)
                    await asyncio.gather(*self.swaps, return_exceptions=True)
                await self.running
            await reading
            assert statistics_of(numbers.queue).leases_out == 0
            assert len([one for one in self.backend.alive() if not one.died.done()]) <= 2
        assert not [one for one in self.backend.alive() if not one.died.done()]
        assert set(self.seen) == set(range(self.sent))
        assert self.may_double or max(self.seen.values(), default=1) == 1

    async def step(self, sender: ra.Sender[Number]) -> None:
        match self.random.choices(OPERATIONS, self.weights)[0]:
            case "put":
                await sender.put(Number(self.sent))
                self.sent += 1
            case "swap":
                orderly = self.weights is ORDERLY or self.random.randrange(4)
                finish = 600.0 if orderly else 0.0
                self.may_double |= not finish
                self.swaps.append(asyncio.create_task(self.swap(finish)))
            case "stop swap":
                for one in self.swaps[-1:]:
                    one.cancel()
            case "kill":
                self.may_double = True
                self.backend.kill(f"Doubler[{self.random.randrange(2)}]")
            case "cancel":
                self.may_double = True
                self.running.cancel()
                with suppress(asyncio.CancelledError):
                    await self.running
                self.running = self.group.call(Doubler.leased, *self.ends)
            case _:
                for _ in range(self.random.randrange(12)):
                    await asyncio.sleep(0)

    async def swap(self, finish: float) -> None:
        with suppress(ra.WorkerDied, BuildError):  # it was killed; another swap is under way
            if self.random.randrange(2):
                await self.group.replace(Tripler, 10_000, finish=finish)
            else:
                await self.group.replace(Doubler, finish=finish)

    async def read(self, doubled: ra.Receiver[Number]) -> None:
        async for number in doubled:
            tripled = number.value >= 10_000
            self.seen[(number.value - 10_000) // 3 if tripled else number.value // 2] += 1


OPERATIONS = ("put", "swap", "stop swap", "kill", "cancel", "wait")
WEIGHTS = (8, 3, 1, 1, 0.3, 6)
ORDERLY = (8, 3, 1, 0, 0, 6)
"""nothing dies and no call is cancelled: what is put, is put once"""


def test_random_programs_of_swaps_kills_and_cancellations_lose_nothing() -> None:
    for seed in range(150):
        try:
            run(Program(seed).main(), seed=seed)
        except BaseException as error:
            error.add_note(f"program {seed}")
            raise


def test_a_restart_that_is_under_way_is_overtaken() -> None:
    class Slow(MortalBackend):
        held: asyncio.Event

        async def start(self, spec: WorkerSpec) -> Mortal:
            if spec.info.incarnation == 1:
                await self.held.wait()
            return await super().start(spec)

    async def main() -> None:
        backend = Slow()
        backend.held = asyncio.Event()
        async with ra.Cluster(backend, devices=()) as cluster:
            numbers = cluster.channel(Number, name="numbers")
            doubled = cluster.channel(Number, name="doubled")
            workers = await cluster.launch(Doubler, restart=Restart())
            running = workers.call(Doubler.leased, numbers.receiver, doubled.sender)
            backend.kill("Doubler[0]")
            await wait_all_blocked()
            await workers.replace(Tripler)
            with numbers.sender as sender:
                await sender.put(Number(5))
            assert (await doubled.receiver.get()).value == 15
            backend.kill("Doubler[0]")  # what is started again is the new class
            await running
            assert (workers.supervisors[0].spec.cls, workers.replaced) == (Tripler, 1)

    run(main())


def test_workers_with_accelerators_are_stopped_first() -> None:
    here = list[str]()

    class Heavy(Teller):
        async def setup(self) -> None:
            if here:
                raise RuntimeError("out of memory")
            if self.greeting == "broken":
                raise RuntimeError("no such robot")
            here.append(self.greeting)

        async def teardown(self) -> None:
            here.remove(self.greeting)

    async def main() -> None:
        gpu = (Device("cuda", 0),)
        async with ra.Cluster.local(devices=gpu) as cluster:
            workers = await cluster.launch(Heavy, "old", placement=ra.Packed())
            await workers.replace(Heavy, "new")
            assert here == ["new"]
            with pytest.raises(WorkerError, match="no such robot"):
                await workers.replace(Heavy, "broken")
            assert here == ["new"]  # started again
            assert await workers.call(Heavy.greet, "you") == ["new you!"]
            assert workers.replaced == 1
        assert not here

    run(main())


# ---- deadlocks


class Stuck(ra.Worker):
    """Leases a number, and puts where nobody takes."""

    async def run(
        self, numbers: ra.Receiver[Number], has: ra.Sender[int], full: ra.Sender[Number]
    ) -> None:
        while True:
            async with numbers.lease() as (number,):
                await has.put(self.incarnation)
                await full.put(number)
                await full.put(number)


@pytest.mark.parametrize("backend", ["local", "process"])
@pytest.mark.parametrize("finish", [600.0, 0.0], ids=["while it leaves", "afterwards"])
async def test_a_deadlock_is_seen_during_a_replacement_and_after_it(
    backend: str, finish: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlock, "PERIOD", 0.05)
    make = ra.Cluster.local if backend == "local" else ra.Cluster.process
    with pytest.raises(ra.Deadlock, match="every worker waits for another"):
        async with make(deadlock_after=0.5) as cluster:
            numbers = cluster.channel(Number, name="numbers")
            has = cluster.channel(int, name="has")
            full = cluster.channel(Number, name="full", capacity=1)
            workers = await cluster.launch(Stuck)
            running = workers.call(Stuck.run, numbers.receiver, has.sender, full.sender)
            with numbers.sender as sender, full.receiver:
                await sender.put(Number(1))
                assert await has.receiver.get() == 0
                await workers.replace(Stuck, finish=finish)
                await running


async def test_a_killed_worker_is_replaced_all_the_same() -> None:
    async with ra.Cluster.process() as cluster:
        numbers = cluster.channel(Number, name="numbers")
        go = cluster.channel(int, name="go")
        out = cluster.channel(Word, name="out")
        workers = await cluster.launch(Holder, "old", name="Holder", restart=Restart())
        running = workers[0].call(Holder.run, numbers.receiver, go.receiver, out.sender)
        said = out.receiver
        with numbers.sender as sender, go.sender as let:
            await sender.put(Number(1))
            assert [await text(said), await text(said)] == ["old begins", "old has 1"]
            replacing = asyncio.create_task(workers.replace(Holder, "new"))
            await leaving(workers)
            kill(cluster, "Holder[0]")  # which is leaving
            assert [await text(said), await text(said)] == ["new begins", "new has 1"]
            await replacing
            await let.put(0)
            assert await text(said) == "new did 1"
            kill(cluster, "Holder[0]")
            assert await text(said) == "new begins"
        await running
        assert (workers.replaced, workers.restarts) == (1, 1)
