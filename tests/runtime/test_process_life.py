"""Processes end with their cluster, whatever happens to either of them."""

# ruff: noqa: PT012  (it is leaving the cluster that raises)

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import rlinf_async as ra
from rlinf_async.channels.wire.session.streams import Heartbeat
from rlinf_async.deadlines import Patience
from rlinf_async.runtime import remote_worker
from rlinf_async.runtime.process import ProcessBackend
from rlinf_async.workers import WorkerUnresponsive
from tests.runtime.kit import (
    NewCluster,
    Parent,
    Teller,
    Waiter,
    connection_to,
    kill,
    waiting,
)
from tests.runtime.scripts import gone, process_runs, running, wait_until_stopped

SCRIPT = """
import asyncio, os, sys
import rlinf_async as ra
from tests.runtime import kit

class Talker(ra.Worker):
    async def talk(self, started: ra.Sender[int]) -> None:
        print("I am", self.name, flush=False)
        await started.put(os.getpid())
        await asyncio.Event().wait()

    async def tuned(self) -> str | None:
        return os.environ.get("TUNED")

    async def once(self, word: str) -> str:
        print("once said", word)
        return word * 2

async def main() -> None:
    async with ra.Cluster.process() as cluster:
        started = cluster.channel(int, name="started")
        talkers = await cluster.launch(Talker, count=2)
        BODY

if __name__ == "__main__":
    ra.run(main())
"""
WAITING = """await cluster.launch(kit.Parent)
        talkers.call(Talker.talk, started.sender)
        pids = [await started.receiver.get(), await started.receiver.get()]
        print("ready", flush=True)
        await asyncio.Event().wait()"""
SAYING = "print(await talkers.call(Talker.once, 'ha'))"

OWN_ENVIRONMENT = """tuned = await cluster.launch(Talker, name="tuned", env_vars={"TUNED": "yes"})
        print(await tuned.call(Talker.tuned), await talkers[0].call(Talker.tuned))"""


@pytest.fixture
def setting() -> tuple[str, str]:
    """Only where there are processes."""
    return "process", "uvloop"


def test_a_class_in_the_main_script_works_and_its_output_is_not_lost() -> None:
    with running(SCRIPT.replace("BODY", SAYING)) as script:
        code, out, err = script.end()
    assert (code, out) == (0, ["['haha', 'haha']"])
    assert sorted(err.splitlines()) == ["Talker[0]: once said ha", "Talker[1]: once said ha"]


def test_ctrl_c_ends_script_and_workers_with_one_message() -> None:
    with running(SCRIPT.replace("BODY", WAITING)) as script:
        script.wait_for("ready")
        os.killpg(script.process.pid, signal.SIGINT)
        code, out, err = script.end()
        assert script.gone()
        assert script.left == []
    assert code == -signal.SIGINT
    assert err.count("Traceback") == 2  # the cancellation, and the KeyboardInterrupt it became
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "rlinf_async.workers" not in err
    assert out == ["ready"]
    assert {f"Talker[{rank}]: I am Talker[{rank}]" for rank in range(2)} <= set(err.splitlines())


def test_workers_go_with_a_driver_that_is_killed() -> None:
    with running(SCRIPT.replace("BODY", WAITING)) as script:
        script.wait_for("ready")
        script.process.kill()
        code, _, err = script.end()
        assert script.gone()
        assert script.left == []
    assert code == -signal.SIGKILL
    assert "Traceback" not in err


STOPPED = """await cluster.launch(kit.Parent)
        await cluster.launch(Forked)
        print(*(cluster.pid(name) for name in ("Talker[0]", "Parent[0]", "Forked[0]")), flush=True)
        await asyncio.Event().wait()

class Forked(Talker):
    @classmethod
    def slow_imports(cls, arguments):
        return ("decimal",)"""


def test_stopped_workers_go_with_a_driver_that_is_killed_and_take_along_what_they_started() -> None:
    with running(SCRIPT.replace("BODY", STOPPED)) as script:
        assert script.process.stdout is not None
        pids = [int(pid) for pid in script.process.stdout.readline().split()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            wait_until_stopped(pid)
        script.process.kill()
        script.process.wait()
        assert script.gone()
        assert script.left == []
    assert len(pids) == 3


def test_a_script_without_a_main_guard_gets_the_hint() -> None:
    source = SCRIPT.replace("BODY", SAYING).replace('if __name__ == "__main__":', "if True:")
    with running(source) as script:
        code, _, err = script.end()
        assert script.gone()
        assert script.left == []
    assert code == 1
    assert "a script must start its cluster under" in err.splitlines()[-1]


def test_an_error_of_the_main_modules_import_is_said_to_be_on_stderr_not_in_the_log(
    tmp_path: Path,
) -> None:
    log = tmp_path / "workers.log"
    source = SCRIPT.replace("BODY", SAYING).replace('if __name__ == "__main__":', "if True:")
    source = source.replace("Cluster.process()", f"Cluster.process(log=Path({str(log)!r}))")
    with running(f"from pathlib import Path\n{source}") as script:
        _, _, err = script.end()
    *before, last = err.splitlines()
    assert "its error is on the stderr of this process (a script must start" in last
    assert any("BuildError: this is the process of a worker" in line for line in before)
    assert str(log) not in last
    assert not log.exists()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Poison:
    """An argument of which a process dies that gets it."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _die, ()


async def test_a_worker_that_is_killed_before_it_connected_is_not_blamed_on_the_script(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        with pytest.raises(
            ra.WorkerDied, match=r"SIGKILL, before it could connect .*memory"
        ) as end:
            await cluster.launch(Teller, Poison())
    assert "__main__" not in str(end.value)


def _raise() -> None:
    raise ZeroDivisionError("as expected")


class Unreadable:
    """An argument that raises where it is decoded."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _raise, ()


async def test_an_error_of_the_arguments_is_in_the_log_and_the_message_names_it(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    log = tmp_path / "workers.log"
    async with new_cluster(log=log) as cluster:
        with pytest.raises(ra.WorkerDied, match="before it could connect; its error is in") as end:
            await cluster.launch(Teller, Unreadable())
    assert str(log) in str(end.value)
    assert "__main__" not in str(end.value)
    assert "ZeroDivisionError: as expected" in log.read_text(encoding="utf-8")


def test_many_more_workers_than_cores_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    backend = ProcessBackend(heartbeat_limit=60.0)
    backend.check_load(8)
    assert caplog.messages == []
    backend.check_load(9)
    backend.check_load(10)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("9 worker processes share 2 cores")


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="only Linux shows it")
def test_a_workers_process_is_known_by_the_workers_name() -> None:
    async def main() -> str:
        async with ra.Cluster.process() as cluster:
            await cluster.launch(Waiter, name="Simulator_of_arms")
            return psutil.Process(cluster.pid("Simulator_of_arms[0]")).name()

    assert asyncio.run(main()) == "Simulator_of_ar"


def test_an_environment_of_its_own_reaches_the_worker_alone() -> None:
    source = SCRIPT.replace("BODY", OWN_ENVIRONMENT)
    with running(source) as script:
        code, out, _ = script.end()
    assert (code, out) == (0, ["['yes'] None"])
    assert "TUNED" not in os.environ


async def test_a_stopped_worker_is_found_unresponsive_and_killed(new_cluster: NewCluster) -> None:
    pid: int | None = None
    with pytest.raises(WorkerUnresponsive, match=r"Waiter\[0\] ") as caught:
        async with new_cluster(heartbeat_limit=45.0) as cluster:
            waiters, running, _ = await waiting(cluster)
            pid = kill(cluster, "Waiter[0]", signal.SIGSTOP)
            monitor = connection_to(waiters).monitor
            assert monitor._heartbeat.limit == 45.0
            quick = Heartbeat.of(0.5)  # before, it may have been slow to start
            monitor._heartbeat, monitor._patience = quick, Patience(quick.limit, quick.interval)
            monitor.start()
            await running
    assert caught.value.failure.pid == pid


async def test_a_worker_that_started_a_process_is_seen_to_die_and_takes_it_along(
    new_cluster: NewCluster,
) -> None:
    pid, started = None, 0
    with pytest.raises(ra.WorkerDied, match="killed by SIGKILL"):
        async with new_cluster() as cluster:
            parent = (await cluster.launch(Parent))[0]
            started = await parent.call(Parent.started)
            pid = kill(cluster, "Parent[0]")
            await parent.call(Parent.forever)
    assert pid is not None
    assert await asyncio.to_thread(gone, pid)
    assert not process_runs(started)


async def test_a_worker_that_a_signal_without_a_name_ends_is_seen_to_die(
    new_cluster: NewCluster,
) -> None:
    nameless = signal.SIGRTMIN + 3
    with pytest.raises(ra.WorkerDied, match=f"killed by signal {nameless}"):
        async with new_cluster() as cluster:
            running = (await waiting(cluster)).running
            kill(cluster, "Waiter[0]", nameless)
            await running


class Steps(ra.Worker):
    """Takes a step of an optimizer."""

    async def step(self) -> str | None:
        return await self.compute(_step)


def _step() -> str | None:
    import torch

    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1).step()
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR")


async def test_torch_leaves_no_empty_folder_behind(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())  # of this test; the worker has it, too
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    async with new_cluster() as cluster:
        made = await (await cluster.launch(Steps))[0].call(Steps.step)
        assert made is not None
        assert os.path.dirname(made) == tempfile.gettempdir()
    assert os.listdir(tempfile.gettempdir()) == []


async def test_a_worker_that_stops_ends_what_it_started(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        parent = (await cluster.launch(Parent))[0]
        pid, started = cluster.pid("Parent[0]"), await parent.call(Parent.started)
        assert process_runs(started)
    assert pid is not None
    assert await asyncio.to_thread(gone, pid)
    assert not process_runs(started)


async def test_a_socket_that_cannot_be_made_is_reported_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ra.BuildError, match=r"deep/rlinf-async-.* cannot be made .*TMPDIR"):
        async with ra.Cluster.process():
            raise AssertionError("it was entered")
    assert list(deep.iterdir()) == []


async def test_a_stopped_worker_does_not_hold_the_end_back(new_cluster: NewCluster) -> None:
    async with new_cluster(grace=0.2) as cluster:
        await cluster.launch(Teller)
        kill(cluster, "Teller[0]", signal.SIGSTOP)


async def test_a_launch_that_is_cancelled_leaves_no_process(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        launching = asyncio.create_task(cluster.launch(Teller, count=2))
        for _ in range(3):
            await asyncio.sleep(0)
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launching
        assert await (await cluster.launch(Teller, name="other")).call(Teller.life) == [0]


async def test_pids_are_those_of_the_processes(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        tellers = await cluster.launch(Teller, count=2)
        assert [cluster.pid(f"Teller[{rank}]") for rank in range(2)] == await tellers.call(
            Teller.pid
        )
        assert cluster.pid("nobody") is None
    assert cluster.pid("Teller[0]") is None


class Asleep(ra.Worker):
    """Is in its setup until its file is there."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    async def setup(self) -> None:
        while not self.file.exists():  # noqa: ASYNC110  # nobody else tells it
            await asyncio.sleep(0.01)


async def test_who_is_long_in_its_setup_is_named_again_and_again(
    tmp_path: Path,
    new_cluster: NewCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(remote_worker, "SET_UP_SECONDS", 0.01)
    async with new_cluster() as cluster:
        launching = asyncio.create_task(cluster.launch(Asleep, str(tmp_path / "go on")))
        while len(caplog.messages) < 2:  # noqa: ASYNC110  # nobody tells of a warning
            await asyncio.sleep(0.01)
        (tmp_path / "go on").touch()
        await launching
    for message, seconds in zip(caplog.messages, ("0.01", "0.02"), strict=False):
        assert f"Asleep[0] has been in its __init__ and setup for {seconds} s (process " in message
