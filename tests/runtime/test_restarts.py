"""A rank that dies is started again: its items flow again, each consumed once."""

# ruff: noqa: PT012  (it is leaving the cluster that raises)

from __future__ import annotations

import asyncio
import os
import signal

import pytest

import rlinf_async as ra
from rlinf_async.channels.queue import statistics_of
from rlinf_async.runtime import Restart
from rlinf_async.runtime.supervise import WorkerSpec
from rlinf_async.testing import ExactlyOnce, explore, wait_all_blocked
from rlinf_async.workers.base import BuildError
from tests.runtime.kit import Broken, Doubler, NewCluster, Number, Teller, Waiter, kill, waiting
from tests.runtime.mortal import Mortal, MortalBackend


@pytest.fixture
def setting() -> tuple[str, str]:
    """These need processes; the backend that fakes death is used without the fixtures."""
    return "process", "uvloop"


async def test_items_leased_by_a_killed_worker_are_delivered_again_once(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        numbers = cluster.channel(Number, name="numbers")
        holds = cluster.channel(int, name="holds")
        waiters = await cluster.launch(Waiter, restart=Restart(max=3))
        running = waiters[0].call(Waiter.holding, numbers.receiver, holds.sender)
        with numbers.sender as sender:
            await sender.put(Number(41))
        for life in range(2):
            assert await holds.receiver.get() == life
            kill(cluster, "Waiter[0]")
        assert await holds.receiver.get() == 2
        assert await holds.receiver.get() == 41
        await running
        seen = statistics_of(numbers.queue)
        assert (seen.depth, seen.leases_out, seen.redelivered) == (0, 0, 2)
        assert waiters.restarts == 2


async def test_a_worker_killed_while_idle_is_back_for_the_next_call(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        tellers = await cluster.launch(Teller, count=2, restart=Restart())
        assert await tellers.call(Teller.life) == [0, 0]
        before = kill(cluster, "Teller[1]")
        assert await tellers.call(Teller.life) == [0, 1]
        assert await tellers[1].call(Teller.pid) not in (before, os.getpid())
        assert cluster.pid("Teller[1]") == await tellers[1].call(Teller.pid)


async def test_without_restarts_a_death_ends_the_run_and_names_the_signal(
    new_cluster: NewCluster,
) -> None:
    pid: int | None = None
    with pytest.raises(ra.WorkerDied, match=r"Waiter\[0\] .*killed by SIGKILL") as caught:
        async with new_cluster() as cluster:
            await waiting(cluster, 2)
            pid = kill(cluster, "Waiter[0]")
            await asyncio.Event().wait()
    assert caught.value.failure.pid == pid
    assert type(caught.value) is ra.WorkerDied


async def test_an_idle_death_ends_the_run_too(new_cluster: NewCluster) -> None:
    with pytest.raises(ra.WorkerDied, match=r"Teller\[1\] .*killed by SIGKILL"):
        async with new_cluster() as cluster:
            await cluster.launch(Teller, count=2)
            kill(cluster, "Teller[1]")
            await asyncio.Event().wait()


async def test_an_exit_code_is_reported(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        broken = await cluster.launch(Broken)
        with pytest.raises(ra.WorkerDied, match="the process ended by itself: exit code 7"):
            await broken.call(Broken.exits, 7)


async def test_a_worker_that_dies_too_often_is_given_up(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        broken = await cluster.launch(Broken, restart=Restart(max=2, within=600.0))
        with pytest.raises(ra.WorkerDied, match="exit code 3") as caught:
            await broken.call(Broken.exits, 3)
        assert caught.value.__notes__ == [
            "Broken[0] was restarted 2 times; the policy allows 2 within 600 s"
        ]
        assert broken.restarts == 2


class KilledInSetup(Teller):
    """Its first life ends before it is ready."""

    async def setup(self) -> None:
        if not self.incarnation:
            os.kill(os.getpid(), signal.SIGKILL)


async def doubled_despite_deaths(backend: MortalBackend, kills: int) -> int:
    """Every number is doubled although the doublers die again and again; how many went back."""
    once = ExactlyOnce[int]()
    async with ra.Cluster(backend, devices=()) as cluster:
        numbers = cluster.channel(Number, name="numbers", capacity=2, max_deliveries=100)
        doubled = cluster.channel(Number, name="doubled", capacity=1)
        doublers = await cluster.launch(Doubler, count=2, restart=Restart(max=kills))
        running = doublers.call(Doubler.leased, numbers.receiver, doubled.sender)

        async def feed() -> None:
            with numbers.sender as sender:
                for value in range(20):
                    once.sent(value * 2)
                    await sender.put(Number(value))

        async def murder() -> None:
            for turn in range(kills):
                for _ in range(5 + 3 * turn):
                    await asyncio.sleep(0)
                backend.kill(f"Doubler[{turn % 2}]")

        async with asyncio.TaskGroup() as group:
            group.create_task(feed())
            group.create_task(murder())
            seen = set[int]()
            async for number in doubled.receiver:
                if number.value not in seen:  # put, but died before it acknowledged: given again
                    once.received(number.value)
                seen.add(number.value)
        await running
        assert statistics_of(numbers.queue).leases_out == 0
        assert doublers.restarts == kills
    once.check()
    return statistics_of(numbers.queue).redelivered


def test_no_item_is_lost_whenever_a_worker_dies() -> None:
    again = explore(lambda: doubled_despite_deaths(MortalBackend(), kills=6), seeds=range(200))
    assert sum(again) > 100  # the deaths did fall into leases


async def dies_while_its_cancelled_call_ends(*, awaited: bool) -> None:
    backend = MortalBackend()
    with pytest.raises(ra.WorkerDied, match="killed by a test"):
        async with ra.Cluster(backend, devices=()) as cluster:
            started = cluster.channel(str, name="started")
            waiter = (await cluster.launch(Waiter))[0]
            running = waiter.call(Waiter.forever, started.sender)
            await started.receiver.get()
            backend.kill("Waiter[0]")
            running.cancel()
            if awaited:
                with pytest.raises(asyncio.CancelledError):
                    await running
            await asyncio.Event().wait()


def test_a_death_while_a_cancelled_call_ends_is_raised_in_any_order() -> None:
    explore(lambda: dies_while_its_cancelled_call_ends(awaited=False), seeds=range(100))


async def test_a_body_that_awaits_the_call_that_it_cancelled_gets_the_death() -> None:
    await dies_while_its_cancelled_call_ends(awaited=True)


def test_a_death_while_it_is_restarted_counts_and_is_survived() -> None:
    async def main() -> None:
        backend = MortalBackend()
        async with ra.Cluster(backend, devices=()) as cluster:
            tellers = await cluster.launch(Teller, restart=Restart(max=3))
            backend.stillborn = 2
            backend.kill("Teller[0]")
            await wait_all_blocked()
            assert await tellers.call(Teller.life) == [3]
            with pytest.raises(ra.WorkerDied, match="killed by a test"):
                backend.kill("Teller[0]")
                await tellers.call(Teller.life)

    explore(main, seeds=range(50))


def test_a_death_while_it_is_launched_counts_and_is_survived() -> None:
    async def main() -> None:
        backend = MortalBackend()
        async with ra.Cluster(backend, devices=()) as cluster:
            backend.stillborn = 2
            tellers = await cluster.launch(Teller, count=2, restart=Restart(max=3))
            assert sum(await tellers.call(Teller.life)) == tellers.restarts == 2

    explore(main, seeds=range(50))


@pytest.mark.parametrize("restart", [None, Restart(max=2)])
def test_a_launch_fails_by_the_death_after_the_last_that_may_be_survived(
    restart: Restart | None,
) -> None:
    async def main() -> None:
        backend = MortalBackend()
        async with ra.Cluster(backend, devices=()) as cluster:
            backend.stillborn = 1000
            with pytest.raises(ra.WorkerDied) as caught:
                await cluster.launch(Teller, restart=restart)
            assert backend.stillborn == 1000 - (1 if restart is None else 3)
            notes = getattr(caught.value, "__notes__", [])
            assert notes == ([] if restart is None else [TWICE])

    explore(main, seeds=range(20))


TWICE = "Teller[0] was restarted 2 times; the policy allows 2 within 60 s"


class Slow(MortalBackend):
    """Takes a while to start a worker, alive or not."""

    async def start(self, spec: WorkerSpec) -> Mortal:
        await asyncio.sleep(50.0)  # of virtual time
        return await super().start(spec)


def test_a_worker_that_takes_long_to_start_and_always_dies_is_not_started_for_ever() -> None:
    async def main() -> None:
        backend = Slow()
        async with ra.Cluster(backend, devices=()) as cluster:
            backend.stillborn = 1000
            with pytest.raises(ra.WorkerDied) as caught:
                await cluster.launch(Teller, restart=Restart(max=2))
            assert backend.stillborn == 1000 - 3
            assert caught.value.__notes__ == [TWICE]

    explore(main, seeds=range(10))


def test_a_worker_that_takes_long_to_start_and_soon_dies_is_not_started_for_ever() -> None:
    async def main() -> None:
        backend = Slow()
        async with ra.Cluster(backend, devices=()) as cluster:
            tellers = await cluster.launch(Teller, restart=Restart(max=2))
            for life in range(1, 3):
                backend.kill("Teller[0]")
                assert await tellers.call(Teller.life) == [life]
            with pytest.raises(ra.WorkerDied, match="killed by a test"):
                backend.kill("Teller[0]")
                await tellers.call(Teller.life)

    explore(main, seeds=range(10))


async def test_a_process_that_is_killed_in_its_setup_is_started_again(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        worker = (await cluster.launch(KilledInSetup, restart=Restart(max=1)))[0]
        assert await worker.call(KilledInSetup.life) == 1


def test_old_deaths_are_forgotten() -> None:
    async def main() -> None:
        backend = MortalBackend()
        async with ra.Cluster(backend, devices=()) as cluster:
            tellers = await cluster.launch(Teller, restart=Restart(max=1, within=60.0))
            for life in range(1, 4):
                backend.kill("Teller[0]")
                await wait_all_blocked()
                assert await tellers.call(Teller.life) == [life]
                await asyncio.sleep(61.0)  # of virtual time

    explore(main, seeds=range(10))


class Full(MortalBackend):
    """Has no place for a second life."""

    async def start(self, spec: WorkerSpec) -> Mortal:
        if self.lives:
            raise BuildError("no other host has 1 free devices")
        return await super().start(spec)


def test_a_worker_that_cannot_be_placed_again_is_dead_and_not_a_wrong_graph() -> None:
    async def main() -> None:
        backend = Full()
        async with ra.Cluster(backend, devices=()) as cluster:
            tellers = await cluster.launch(Teller, restart=Restart())
            with pytest.raises(
                ra.WorkerDied, match=r"by a test; it cannot be .* again: no other host"
            ):
                backend.kill("Teller[0]")
                await tellers.call(Teller.life)

    explore(main, seeds=range(50))


class Once(MortalBackend):
    """Starts workers, but none a second time."""

    async def start(self, spec: WorkerSpec) -> Mortal:
        if self.lives:
            raise OSError(11, "no more processes")
        return await super().start(spec)


def test_a_restart_that_fails_otherwise_is_raised_by_the_waiting_call() -> None:
    async def main() -> None:
        backend = Once()
        async with ra.Cluster(backend, devices=()) as cluster:
            tellers = await cluster.launch(Teller, restart=Restart())
            with pytest.raises(OSError, match="no more processes"):
                backend.kill("Teller[0]")
                await tellers.call(Teller.life)

    explore(main, seeds=range(50))
