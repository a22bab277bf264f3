"""Workers are forked from a process that has imported what they need, and are as any others."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import select
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import rlinf_async as ra
from rlinf_async.config.registry import names_for_workers
from rlinf_async.runtime import forked
from rlinf_async.runtime import process as spawning
from rlinf_async.workers import WorkerDied
from tests.jobs.processes import until
from tests.runtime.kit import NewCluster, kill
from tests.runtime.scripts import gone, process_runs, running

SLOW = ("numpy", "tests.runtime.no_such_module")
"""what cannot be imported is left to the worker"""


class Look(ra.Worker):
    """Says what its process is like."""

    def __init__(self, slow: bool = True, more: object = None) -> None:
        self.slow = slow

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        return SLOW if arguments["slow"] else ()

    async def parent(self) -> int:
        return os.getppid()

    async def environment(self) -> dict[str, str]:
        return dict(os.environ)

    async def place(self) -> tuple[str, list[str], list[str]]:
        return os.getcwd(), sys.argv, sys.path

    async def numbers(self) -> tuple[float, float, float]:
        import torch  # all other tests do without, and so need not wait for it

        return random.random(), float(np.random.random()), torch.rand(1).item()

    async def files(self) -> list[str]:
        return sorted(os.readlink(f"/proc/self/fd/{one}") for one in _descriptors())

    async def say(self, word: str) -> None:
        print(word)

    async def leave_one_behind(self) -> int:
        if not os.fork():
            signal.pause()
        return os.getpgrp()

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def end(self, code: int) -> None:
        os._exit(code)


def _descriptors() -> list[str]:
    return [one for one in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{one}").exists()]


@pytest.fixture
def setting() -> tuple[str, str]:
    """Only where there are processes."""
    return "process", "uvloop"


@pytest.fixture(autouse=True)
def _own_servers() -> None:
    """Servers of other tests are not counted."""
    forked.close_servers()


async def test_ranks_and_restarts_are_forked_from_one_process(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        looks = await cluster.launch(Look, count=2, restart=ra.Restart())
        [server] = forked.pids()
        assert await looks.call(Look.parent) == [server, server]
        pid = kill(cluster, "Look[0]")
        while cluster.pid("Look[0]") in (pid, None):  # calls that run when it is seen to die fail
            with suppress(WorkerDied):
                assert await looks.call(Look.parent) == [server, server]


async def test_what_says_that_it_imports_nothing_slow_is_not(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        look = (await cluster.launch(Look, slow=False))[0]
        assert await look.call(Look.parent) == os.getpid()
    assert forked.pids() == set()


async def test_a_forked_worker_has_what_a_spawned_one_has(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with new_cluster() as cluster:
        (await cluster.launch(Look, name="first"))[0]  # starts the server
        monkeypatch.chdir(tempfile.gettempdir())
        monkeypatch.setattr(sys, "path", [*sys.path, tempfile.gettempdir()])
        fork = (await cluster.launch(Look, name="forked", env_vars={"TUNED": "yes"}))[0]
        spawned = (await cluster.launch(Look, False, name="spawned", env_vars={"TUNED": "yes"}))[0]
        told = names_for_workers() | {"TUNED": "yes"}  # a test before may have registered some
        assert await fork.call(Look.environment) == os.environ | told
        assert await fork.call(Look.place) == await spawned.call(Look.place)
        files = [
            Counter(one.partition(":")[0] for one in await which.call(Look.files))
            for which in (fork, spawned)
        ]
        assert files[0] <= files[1]


async def test_another_environment_has_another_process_to_be_forked_from(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with new_cluster() as cluster:
        one = (await cluster.launch(Look, name="one"))[0]
        other = (await cluster.launch(Look, name="other", env_vars={"OMP_NUM_THREADS": "7"}))[0]
        monkeypatch.setenv("PYTEST_CURRENT_TEST", "which nothing reads when it is imported")
        third = (await cluster.launch(Look, name="third", env_vars={"OMP_NUM_THREADS": "7"}))[0]
        parents = [await look.call(Look.parent) for look in (one, other, third)]
    assert parents[0] != parents[1] == parents[2]


async def test_environments_that_take_turns_keep_their_processes_unless_they_are_too_many(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "SERVERS", 2)
    async with new_cluster() as cluster:
        parents = []
        for turn, threads in enumerate("1212313"):
            env_vars = {"OMP_NUM_THREADS": threads}
            look = (await cluster.launch(Look, name=f"turn{turn}", env_vars=env_vars))[0]
            parents.append(await look.call(Look.parent))
    one, two, *others = parents
    assert one != two
    assert others[:2] == [one, two]
    _, again, last = others[2:]
    assert again not in (one, two)  # "1" was asked longer ago than "2" when "3" came
    assert last == others[2]


async def test_ranks_do_not_draw_the_same_random_numbers(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SLOW", (*SLOW, "torch"))
    async with new_cluster() as cluster:
        looks = await cluster.launch(Look, count=2)
        mine, others = list(await looks.call(Look.numbers))
    assert all(one != other for one, other in zip(mine, others, strict=True))


async def test_a_module_that_exits_when_it_is_imported_takes_no_other_worker_along(
    tmp_path: Path, new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "which_exits.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with new_cluster() as cluster:
        first = (await cluster.launch(Look, name="first"))[0]
        server = await first.call(Look.parent)
        monkeypatch.setattr(f"{__name__}.SLOW", (*SLOW, "which_exits"))
        other = (await cluster.launch(Look, name="other"))[0]
        assert await other.call(Look.parent) == server
        assert await first.call(Look.parent) == server


async def test_a_death_is_told_while_modules_are_imported(
    tmp_path: Path, new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("begins", "goes_on"):  # each is imported once somebody has written to it
        os.mkfifo(tmp_path / name)
        (tmp_path / f"which_{name}.py").write_text(f"open({str(tmp_path / name)!r}).read()\n")
    async with new_cluster() as cluster:
        first = (await cluster.launch(Look, name="first"))[0]
        waiting = first.call(Look.wait)
        monkeypatch.setattr(f"{__name__}.SLOW", (*SLOW, "which_begins", "which_goes_on"))
        other = asyncio.create_task(cluster.launch(Look, name="other"))
        with await asyncio.to_thread((tmp_path / "begins").open, "w"):
            end = os.pidfd_open(kill(cluster, "first[0]"))
            await asyncio.to_thread(select.select, [end], [], [])
            os.close(end)
        with pytest.raises(WorkerDied, match="killed"):
            await waiting
        await asyncio.to_thread((tmp_path / "goes_on").write_text, "")
        await (await other)[0].call(Look.parent)


async def test_imports_that_start_threads_are_named_and_their_workers_spawned(
    tmp_path: Path,
    new_cluster: NewCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "which_starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    async with new_cluster() as cluster:
        first = (await cluster.launch(Look, name="first"))[0]
        server = await first.call(Look.parent)
        with monkeypatch.context() as patch:
            patch.setattr(f"{__name__}.SLOW", (*SLOW, "which_starts_a_thread"))
            others = await cluster.launch(Look, count=2, name="others")
            assert await others.call(Look.parent) == [os.getpid(), os.getpid()]
        assert await first.call(Look.parent) == server  # it goes on
        last = (await cluster.launch(Look, name="last"))[0]
        assert await last.call(Look.parent) not in (server, os.getpid())
    said = {one.message.partition("#")[0] for one in caplog.records}
    assert said == {"others[0]", "others[1]"}
    assert "which_starts_a_thread starts threads" in caplog.text


async def test_a_module_that_kills_the_process_that_imports_it_is_named_and_its_workers_spawned(
    tmp_path: Path,
    new_cluster: NewCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "which_kills.py").write_text(
        "import os, sys\nif 'fork_server' in sys.argv:\n    os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(f"{__name__}.SLOW", (*SLOW, "which_kills"))
    async with new_cluster() as cluster:
        for number in range(2):  # the second one does not try again
            look = (await cluster.launch(Look, name=f"look{number}"))[0]
            assert await look.call(Look.parent) == os.getpid()
            assert forked.pids() == set()
    assert len(caplog.messages) == 2
    assert "which_kills was killed before it could fork, and the next one, too" in caplog.text


def test_who_asks_a_server_that_has_threads_by_the_imports_of_another_asks_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "which_starts_one.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    server = forked._Server(os.environ)
    pipes = [os.pipe() for _ in range(2)]
    try:
        for imports, (_, write) in zip((("which_starts_one",), ("json",)), pipes, strict=True):
            assert server.fork(imports, (write, write))
        with pytest.raises(forked.NotForked, match="which_starts_one starts threads"):
            server.answer(pipes[0][0], ("which_starts_one",))
        with pytest.raises(forked._AskAnother):
            server.answer(pipes[1][0], ("json",))
    finally:
        server.wait()
        for descriptor in (one for pipe in pipes for one in pipe):
            os.close(descriptor)


async def test_a_server_that_does_not_answer_is_named_and_let_go_and_the_worker_spawned(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with new_cluster() as cluster:
        first = (await cluster.launch(Look, name="first"))[0]
        server = psutil.Process(await first.call(Look.parent))
        server.suspend()
        with monkeypatch.context() as patch:
            patch.setattr(forked, "ANSWER_SECONDS", 0.01)  # it would not answer in any time
            other = (await cluster.launch(Look, name="other"))[0]
        assert await other.call(Look.parent) == os.getpid()
        [warning] = caplog.messages
        assert warning.startswith("other[0]#0 is not forked, and so starts more slowly: ")
        assert f"the process {server.pid}, which imports numpy, " in warning
        last = (await cluster.launch(Look, name="last"))[0]
        assert await last.call(Look.parent) not in (server.pid, os.getpid())
        server.resume()
        assert await first.call(Look.parent) == server.pid


async def test_a_server_that_has_ended_is_no_zombie(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        look = (await cluster.launch(Look))[0]
        server = await look.call(Look.parent)
        os.kill(server, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await look.call(Look.wait)
        await asyncio.to_thread(until, lambda: not psutil.pid_exists(server), "it is gone")


async def test_a_process_that_this_one_forks_has_servers_of_its_own(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        look = (await cluster.launch(Look))[0]
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            child = os.fork()  # newer versions of Python warn of threads
        if not child:
            os._exit(len(forked.pids()))
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert forked.pids() == {await look.call(Look.parent)}


def test_where_the_end_of_a_process_cannot_be_watched_none_is_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.ENOSYS, "not here")

    assert spawning.may_be_forked("cpu")
    monkeypatch.setattr(os, "pidfd_open", refused)
    assert not spawning.may_be_forked("cpu")


async def test_what_a_worker_leaves_behind_is_killed_before_its_end_is_told(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        look = (await cluster.launch(Look))[0]
        group = await look.call(Look.leave_one_behind)
        with pytest.raises(WorkerDied, match="exit code 3"):
            await look.call(Look.end, 3)
        assert gone(group)


async def test_who_killed_a_worker_is_said(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        look = (await cluster.launch(Look))[0]
        pid = cluster.pid("Look[0]")
        assert pid is not None
        os.kill(forked.pids().pop(), signal.SIGKILL)
        with pytest.raises(WorkerDied, match="from which it was forked was killed"):
            await look.call(Look.wait)
        assert gone(pid)


async def test_workers_of_a_killed_server_have_ended_and_the_next_get_another(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        looks = await cluster.launch(Look, count=2, restart=ra.Restart())
        [server] = forked.pids()
        assert await looks.call(Look.parent) == [server, server]
        os.kill(server, signal.SIGKILL)
        found = [server]
        while (
            server in found or set(found) != forked.pids()
        ):  # calls that run when the end is seen fail
            with suppress(WorkerDied):
                found = await looks.call(Look.parent)
        assert server not in found


SCRIPT = """
import asyncio
import rlinf_async as ra
from tests.runtime.test_fork_server import Look

class Own(Look):
    pass

async def main() -> None:
    async with ra.Cluster.process() as cluster:
        looks = await cluster.launch(Own, count=2)
        await looks.call(Own.say, "here")
        looks.call(Own.wait)
        print("ready", flush=True)
        await asyncio.Event().wait()

if __name__ == "__main__":
    ra.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_ends_takes_server_and_workers_along(number: signal.Signals) -> None:
    with running(SCRIPT) as script:
        script.wait_for("ready")
        assert len(psutil.Process(script.process.pid).children(recursive=True)) >= 3
        os.killpg(script.process.pid, number)
        _, out, err = script.end()
        assert script.gone()
        assert script.left == []
    assert out == ["ready"]
    assert {"Own[0]: here", "Own[1]: here"} <= set(err.splitlines())


STUCK = """
import asyncio, ctypes, os, sys
from collections.abc import Mapping, Sequence
from pathlib import Path
import rlinf_async as ra

def reach(place: str) -> None:
    if os.environ.get("STOPS") == place:
        Path(__file__).with_name(place).touch()
        while True:
            ctypes.PyDLL(None).pause()  # holds the interpreter lock: no other thread runs

class Argument:
    def __setstate__(self, state: object) -> None:
        reach("argument")

class Own(ra.Worker):
    def __init__(self, argument: Argument) -> None:
        reach("init")

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, object]) -> Sequence[str]:
        return ("which_stops",)

    async def wait(self) -> None:
        reach("method")
        await asyncio.Event().wait()

async def main() -> None:
    async with ra.Cluster.process() as cluster:
        def launch(place: str) -> asyncio.Future[object]:
            argument = Argument()
            argument.some = "state"
            return asyncio.ensure_future(
                cluster.launch(Own, argument, name=place, env_vars={"STOPS": place})
            )

        for place in ("nowhere", "method"):
            (await launch(place)).call(Own.wait)
        launching = [launch(place) for place in ("server", "main", "argument", "init")]
        await asyncio.wait(launching)

if __name__ == "__main__":
    ra.run(main())
elif __name__ == "__mp_main__":
    reach("main")
"""


def test_nothing_outlives_a_driver_that_is_killed_whatever_it_is_stuck_in() -> None:
    with running(STUCK) as script:
        module = "import ctypes, os, pathlib\n" + STUCK[STUCK.index("def reach") :].partition(
            "class"
        )[0].replace("Path(", "pathlib.Path(")
        (script.folder / "which_stops.py").write_text(f"{module}\nreach('server')\n")
        for place in ("method", "server", "main", "argument", "init"):
            until((script.folder / place).exists, f"{place} is reached")
        script.process.kill()
        assert script.gone()
        assert script.left == []


async def test_a_server_that_does_not_tell_of_an_end_is_killed(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with new_cluster(grace=0.1) as cluster:
        look = (await cluster.launch(Look))[0]
        server = psutil.Process(await look.call(Look.parent))
        assert forked.pids() == {server.pid}
        server.suspend()
        monkeypatch.setattr(forked, "ANSWER_SECONDS", 0.1)
    until(lambda: not process_runs(server.pid), "the server is gone")


@pytest.mark.parametrize("slow", [True, False])
async def test_a_process_that_does_not_read_what_it_is_to_do_is_killed_and_that_is_said(
    slow: bool,
    new_cluster: NewCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It stops where it unpickles the first of its arguments; the second is larger than a pipe."""
    async with new_cluster() as cluster:
        await cluster.launch(Look, slow, name="first")  # its server has imported all
        monkeypatch.setattr(forked, "ANSWER_SECONDS", 2.0)
        with pytest.raises(WorkerDied, match=r"killed by SIGKILL, before it could connect"):
            await cluster.launch(Look, slow, (Stops(), bytes(1 << 20)))
    assert "Look[0]#0 has not read what it is to do within 2 s, and is killed" in caplog.text


class Stops:
    """What stops the process in which it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _stop, ()


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
