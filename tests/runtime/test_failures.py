"""A failure is raised once, where it can be handled, and its cause is never hidden."""

# ruff: noqa: PT012  (it is leaving the cluster that raises)

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

import rlinf_async as ra
from rlinf_async.channels import ChannelFailed
from rlinf_async.testing import explore
from tests.runtime.kit import Broken, Doubler, NewCluster, Number, Setup, Teller, Waiter, waiting


async def test_an_awaited_failure_names_who_where_and_what(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        broken = await cluster.launch(Broken, count=2)
        with pytest.raises(ra.WorkerError) as caught:
            await broken[1].call(Broken.at_once)
        failure = caught.value.failure
        assert (failure.worker, failure.method) == ("Broken[1]", "at_once")
        assert (failure.error_type, failure.message) == ("ValueError", "rank 1 is broken")
        assert "raise ValueError" in failure.traceback
        assert failure.host == os.uname().nodename
        separate = cluster.pid("Broken[1]")
        assert failure.pid == (separate or os.getpid())
        if separate is None:
            assert isinstance(caught.value.__cause__, ValueError)
        assert str(failure.pid) in caught.value.summary


async def test_a_method_that_calls_exit_has_failed(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        broken = await cluster.launch(Broken)
        with pytest.raises(ra.WorkerError, match="SystemExit: 3"):
            await broken.call(Broken.calls_exit)
        assert await broken.call(Broken.only, 1) == [0]


async def test_a_handled_failure_does_not_end_the_cluster(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        broken = await cluster.launch(Broken, count=2)
        with pytest.raises(ra.WorkerError, match="rank 1 is broken"):
            await broken.call(Broken.only, 1)
        assert await broken.call(Broken.only, 2) == [0, 1]


async def test_a_failure_nobody_awaits_ends_the_cluster(new_cluster: NewCluster) -> None:
    with pytest.raises(ra.WorkerError, match="rank 0 is broken") as caught:
        async with new_cluster() as cluster:
            broken = await cluster.launch(Broken)
            broken.call(Broken.at_once)
            await asyncio.Event().wait()
    assert caught.value.worker == "Broken[0]"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_after_a_handled_failure_the_next_one_is_raised(new_cluster: NewCluster) -> None:
    with pytest.raises(ra.WorkerError, match="rank 0 is broken"):
        async with new_cluster() as cluster:
            broken = await cluster.launch(Broken, count=2)
            with pytest.raises(ra.WorkerError, match="rank 1 is broken"):
                await broken.call(Broken.only, 1)
            broken.call(Broken.only, 0)
            await asyncio.Event().wait()


async def test_the_bodys_own_error_is_raised_as_it_is(new_cluster: NewCluster) -> None:
    with pytest.raises(ZeroDivisionError):
        async with new_cluster() as cluster:
            await waiting(cluster, 2)
            _ = 1 / 0


async def test_a_call_still_running_at_the_end_of_the_body_is_cancelled(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        running = (await waiting(cluster)).running
    assert running.done()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_failure_while_it_is_cancelled_is_logged(
    new_cluster: NewCluster, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async with new_cluster() as cluster:
        started = cluster.channel(str, name="started")
        (await cluster.launch(Broken)).call(Broken.while_cancelled, started.sender)
        await started.receiver.get()
    said = caplog.text + capfd.readouterr().err  # a worker process logs to stderr
    assert "after it was cancelled, Broken[0] failed in while_cancelled" in said
    assert "KeyError: 'cleaning up failed'" in said


async def test_a_method_cancelled_from_inside_is_a_failure(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        broken = await cluster.launch(Broken)
        with pytest.raises(ra.WorkerError, match="that it awaited was cancelled, not the call"):
            await broken.call(Broken.cancels_itself)


async def test_a_failure_that_the_bodys_error_led_to_never_hides_it(
    new_cluster: NewCluster,
) -> None:
    """A worker learns by its channel that the body has failed, and fails too, while the body is
    still cleaning up: what is raised is the error of the body."""
    with pytest.raises(ZeroDivisionError):
        async with new_cluster() as cluster:
            numbers = cluster.channel(Number, name="numbers", capacity=1)
            doubled = cluster.channel(Number, name="doubled", capacity=1)
            doublers = await cluster.launch(Doubler)
            doublers.call(Doubler.run, numbers.receiver, doubled.sender)
            with numbers.sender:
                await numbers.sender.put(Number(1))
                await doubled.receiver.get()
                try:
                    with doubled.receiver:
                        _ = 1 / 0
                finally:
                    await numbers.sender.put(Number(2))
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.Event().wait()


async def failing_chain(cluster: ra.Cluster) -> None:
    """Two stages; the first fails at 3, the second learns of it by its channel."""
    numbers = cluster.channel(Number, name="numbers", capacity=1)
    middle = cluster.channel(Number, name="middle", capacity=1)
    doubled = cluster.channel(Number, name="doubled", capacity=1)
    broken = await cluster.launch(Broken, count=2)
    doublers = await cluster.launch(Doubler, count=2)
    doublers.call(Doubler.run, middle.receiver, doubled.sender)
    broken.call(Broken.on, 3, numbers.receiver, middle.sender)
    async with asyncio.TaskGroup() as group:
        group.create_task(_feed(numbers.sender))
        async for _ in doubled.receiver:
            pass


async def _feed(sender: ra.Sender[Number]) -> None:
    with sender:
        for value in range(8):
            await sender.put(Number(value))


async def test_what_a_failure_led_to_never_hides_it(new_cluster: NewCluster) -> None:
    with pytest.raises(ra.WorkerError, match="ValueError: cannot take 3"):
        async with new_cluster() as cluster:
            await failing_chain(cluster)


def test_what_a_failure_led_to_never_hides_it_in_any_order() -> None:
    async def main() -> None:
        with pytest.raises(ra.WorkerError) as caught:
            async with ra.Cluster.local() as cluster:
                await failing_chain(cluster)
        assert caught.value.failure.message == "cannot take 3"
        assert isinstance(caught.value.__cause__, ValueError)

    explore(main, seeds=range(300))


@pytest.mark.parametrize("awaited", ["first", "second", "second then first"])
def test_an_awaited_stage_raises_the_cause_too(awaited: str) -> None:
    async def main() -> None:
        with pytest.raises(ra.WorkerError) as caught:
            async with ra.Cluster.local() as cluster:
                numbers = cluster.channel(Number, name="numbers")
                middle = cluster.channel(Number, name="middle")
                out = cluster.channel(Number, name="out")
                broken = await cluster.launch(Broken)
                doublers = await cluster.launch(Doubler)
                first = broken.call(Broken.on, 0, numbers.receiver, middle.sender)
                second = doublers.call(Doubler.run, middle.receiver, out.sender)
                with numbers.sender as sender:
                    await sender.put(Number(0))
                if awaited != "first":
                    await second
                if awaited != "second":
                    await first
        assert caught.value.failure.message == "cannot take 0"

    explore(main, seeds=range(100))


def test_of_several_primary_failures_one_is_raised_and_it_is_whole() -> None:
    async def main() -> None:
        with pytest.raises(ra.WorkerError) as caught:
            async with ra.Cluster.local() as cluster:
                broken = await cluster.launch(Broken, count=4)
                await asyncio.gather(*(broken.call(Broken.at_once) for _ in range(3)))
        assert isinstance(caught.value.__cause__, ValueError)
        assert caught.value.failure.message.endswith("is broken")

    explore(main, seeds=range(100))


def test_a_refused_item_is_a_cause_not_a_consequence() -> None:
    async def main() -> None:
        with pytest.raises(ra.WorkerError, match="WrongItemType"):
            async with ra.Cluster.local() as cluster:
                numbers = cluster.channel(Number, name="numbers")
                out = cluster.channel(Number, name="out")
                doublers = await cluster.launch(Doubler)
                liars = await cluster.launch(Liar)
                doublers.call(Doubler.run, numbers.receiver, out.sender)
                liars.call(Liar.run, numbers.sender)
                await out.receiver.get()

    explore(main, seeds=range(50))


class Liar(ra.Worker):
    async def run(self, numbers: ra.Sender[Number]) -> None:
        wrong: object = "not a number"
        await numbers.put(wrong)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_the_body_sees_the_failure_on_its_channels_too(new_cluster: NewCluster) -> None:
    with pytest.raises(ra.WorkerError, match="cannot take 0"):
        async with new_cluster() as cluster:
            numbers = cluster.channel(Number, name="numbers")
            out = cluster.channel(Number, name="out")
            broken = await cluster.launch(Broken)
            running = broken.call(Broken.on, 0, numbers.receiver, out.sender)
            with numbers.sender as sender:
                await sender.put(Number(0))
            with pytest.raises(ra.WorkerError):
                await running
            with pytest.raises(ChannelFailed, match="cannot take 0"):
                await out.receiver.get()
            await out.receiver.get()


async def test_when_one_rank_fails_in_setup_none_is_left(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    async with new_cluster() as cluster:
        with pytest.raises(ra.WorkerError, match=r"Setup\[1\] failed in setup .*no such robot"):
            await cluster.launch(Setup, str(tmp_path), broken=1, count=3, name="Setup")
        assert "Setup" not in cluster.groups
        assert cluster.pid("Setup[0]") is None
        again = await cluster.launch(Setup, str(tmp_path), broken=-1, count=2, name="Setup")
        assert await again.call(Setup.rank_of) == [0, 1]


async def test_teardown_runs_when_the_cluster_is_left(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    async with new_cluster() as cluster:
        await cluster.launch(Setup, str(tmp_path), broken=-1, count=2)
    assert set(os.listdir(tmp_path)) == {"Setup[0] left", "Setup[1] left"}


async def test_the_constructors_failure_is_raised(new_cluster: NewCluster) -> None:
    with pytest.raises(ra.WorkerError, match=r"Picky\[0\] failed in __init__ .*ValueError: 3"):
        async with new_cluster() as cluster:
            await cluster.launch(Picky, 3)


class Picky(ra.Worker):
    def __init__(self, value: int) -> None:
        raise ValueError(value)


async def test_a_failing_call_leaves_the_others_of_the_worker_alone(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        numbers = cluster.channel(Number, name="numbers")
        waiter = (await cluster.launch(Waiter))[0]
        teller = (await cluster.launch(Teller))[0]
        waiting = waiter.call(Waiter.for_item, numbers.receiver)
        assert await teller.call(Teller.greet, "x") == "hello x!"
        with numbers.sender as sender:
            await sender.put(Number(4))
        assert await waiting == 4


class Noisy(ra.Worker):
    """Fails in ``setup`` on one rank, and in ``teardown`` on the other."""

    async def setup(self) -> None:
        if self.rank == 1:
            await asyncio.sleep(0)  # rank 0 is there by then
            raise ValueError("the cause")

    async def teardown(self) -> None:
        raise RuntimeError("the noise")


async def test_a_failed_launch_raises_its_cause_even_if_other_ranks_fail_too(
    new_cluster: NewCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with new_cluster() as cluster:
        with pytest.raises(ra.WorkerError, match=r"Noisy\[1\] failed in setup .*the cause"):
            await cluster.launch(Noisy, count=2)
        assert cluster.groups == {}


class GivesUp(ra.Worker):
    async def run(self, numbers: ra.Receiver[Number]) -> None:
        while True:
            try:
                async with numbers.lease() as (number,):
                    raise KeyError(f"cannot use {number.value}")
            except KeyError:
                continue
            except ra.EndOfChannel:
                return


async def test_the_report_names_what_was_given_up(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        numbers = cluster.channel(Number, name="numbers", max_deliveries=2)
        worker = await cluster.launch(GivesUp)
        running = worker.call(GivesUp.run, numbers.receiver)
        with numbers.sender as sender:
            await sender.put(Number(4))
        await running
        report = cluster.report()
    assert "dead letters of channel 'numbers': 1, the last after 2 deliveries: KeyError" in report
    assert "cannot use 4" in report
