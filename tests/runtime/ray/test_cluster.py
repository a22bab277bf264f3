"""A cluster on three hosts of Ray: placement, calls, channels, deaths, and what is left."""

# ruff: noqa: PT012  (it is leaving the cluster that raises)

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import ModuleType

import psutil
import pytest

import rlinf_async as ra
from rlinf_async.runtime.launching import Packed, Ranks
from rlinf_async.runtime.ray import backend
from rlinf_async.workers.base import BuildError
from tests.channels.wire.harness import until
from tests.runtime.kit import Number
from tests.runtime.ray.kit import Adder, Broken, Doubler, Hosts, Teller
from tests.runtime.scripts import running
from tests.runtime.test_homes import Counter as Counting

pytestmark = pytest.mark.xdist_group("ray")


def names(cluster: ra.Cluster, group: str, count: int) -> list[str | None]:
    return [cluster.host(f"{group}[{rank}]") for rank in range(count)]


async def gone(pid: int) -> None:
    """Wait until a process has ended."""
    with suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(psutil.Process(pid).wait)


async def test_ranks_run_on_the_hosts_of_their_devices_and_see_those_alone(hosts: Hosts) -> None:
    async with ra.Cluster.ray(address=hosts.address) as cluster:
        assert Counter(one.host for one in cluster.devices) == {"alpha": 2, "beta": 4, "gamma": 4}
        pairs = await cluster.launch(Teller, count=2, placement=Ranks([[2, 3], [8, 9]]))
        assert names(cluster, "Teller", 2) == ["beta", "gamma"]
        seen = [text.split(",") for text in await pairs.call(Teller.sees)]
        assert [len(set(numbers)) for numbers in seen] == [2, 2]
        sharing = await cluster.launch(Teller, name="S", count=2, placement=Ranks([3, 4]))
        assert names(cluster, "S", 2) == ["beta", "beta"]
        first, second = await sharing.call(Teller.sees)
        assert first == seen[0][1]
        assert second not in seen[0]
        robots = await cluster.launch(Teller, name="R", resources={"robot": 1})
        assert names(cluster, "R", 1) == ["gamma"]
        assert await robots.call(Teller.sees) == [""]
        free = await cluster.launch(Teller, name="F", count=3, env_vars={"COLOUR": "red"})
        assert sorted(map(str, names(cluster, "F", 3))) == ["alpha", "beta", "gamma"]
        assert await free.call(Teller.variable, "COLOUR") == ["red"] * 3
        both = {"env_vars": {"COLOUR": "green", "SHADE": "dark"}}
        dark = (
            await cluster.launch(Teller, name="D", env_vars={"COLOUR": "red"}, runtime_env=both)
        )[0]
        assert await dark.call(Teller.variable, "COLOUR") == "red"
        assert await dark.call(Teller.variable, "SHADE") == "dark"
        with pytest.raises(BuildError, match=r"no field 'woking_dir' \(did you mean 'working_dir'"):
            await cluster.launch(Teller, name="W", runtime_env={"woking_dir": "."})
        with pytest.raises(BuildError, match=r"N: runtime_env=.* the value 6 is of type"):
            await cluster.launch(Teller, name="N", runtime_env={"env_vars": {"X": 6}})


async def test_launches_at_the_same_time_share_what_they_both_ask_for(hosts: Hosts) -> None:
    async with ra.Cluster.ray(address=hosts.address, wait=1.0) as cluster:
        one, other = await asyncio.gather(
            cluster.launch(Teller, name="One", placement=Ranks([2])),
            cluster.launch(Teller, name="Other", placement=Ranks([[2, 3]])),
        )
        [number] = (await one[0].call(Teller.sees)).split(",")
        assert number in (await other[0].call(Teller.sees)).split(",")


async def test_a_launch_that_fails_takes_nothing_from_one_that_waits(hosts: Hosts) -> None:
    # What tests before gave back Ray may take long to free, and to start actors.
    async with ra.Cluster.ray(address=hosts.address, wait=300.0) as cluster:
        async with ra.Cluster.ray(address=hosts.address, wait=300.0) as other:
            await other.launch(Teller, placement=Ranks([[2, 3, 4, 5]]))  # all of that host
            waiting = asyncio.create_task(cluster.launch(Teller, placement=Ranks([2])))
            with pytest.raises(ra.WorkerError, match="not today"):
                await cluster.launch(Broken)
            assert not waiting.done()
        assert await (await waiting)[0].call(Teller.sees) != ""


async def test_the_ranks_of_a_group_on_two_hosts_meet_in_torch_distributed(hosts: Hosts) -> None:
    async with ra.Cluster.ray(address=hosts.address) as cluster:
        adders = await cluster.launch(Adder, count=2, placement=Ranks([2, 6]), collective="gloo")
        assert names(cluster, "Adder", 2) == ["beta", "gamma"]
        assert await adders.call(Adder.total) == [3.0, 3.0]


async def test_a_death_names_worker_host_and_cause_and_its_last_words_are_kept(
    hosts: Hosts, tmp_path: Path
) -> None:
    log = tmp_path / "workers.log"
    with pytest.raises(ra.WorkerDied, match=r"Teller\[0\] failed in its process .* on beta") as end:
        async with ra.Cluster.ray(address=hosts.address, log=log) as cluster:
            teller = (await cluster.launch(Teller, placement=Packed(start=2)))[0]
            await teller.call(Teller.end, 3)
    assert "crashed, or called os._exit" in str(end.value)
    assert "Teller[0] on beta: last words" in log.read_text(encoding="utf-8")


async def test_each_of_two_clusters_has_its_own_output(hosts: Hosts, tmp_path: Path) -> None:
    async with ra.Cluster.ray(address=hosts.address, log=tmp_path / "one.log") as one:
        first = (await one.launch(Teller, name="First"))[0]
        async with ra.Cluster.ray(address=hosts.address, log=tmp_path / "other.log") as other:
            second = (await other.launch(Teller, name="Second"))[0]
            await second.call(Teller.say, "of the second")
        await first.call(Teller.say, "of the first")
    words = [(tmp_path / name).read_text(encoding="utf-8") for name in ("one.log", "other.log")]
    assert ["of the first" in text for text in words] == [True, False]
    assert ["of the second" in text for text in words] == [False, True]


async def test_a_killed_worker_is_started_again_and_its_items_flow(hosts: Hosts) -> None:
    async with ra.Cluster.ray(address=hosts.address) as cluster:
        numbers = cluster.channel(int, name="numbers")
        doubles = cluster.channel(int, name="doubles", capacity=1)
        doublers = await cluster.launch(Doubler, count=2, restart=ra.Restart())
        running = doublers.call(Doubler.run, numbers.receiver, doubles.sender)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(put_all(numbers.sender, 40))
            found = [await doubles.receiver.get()]
            os.kill(cluster.pid("Doubler[0]") or 0, signal.SIGKILL)
            while set(found) < {2 * number for number in range(40)}:
                found.append(await doubles.receiver.get())
        await until(lambda: doublers.restarts == 1)  # the other rank may have been quicker
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def put_all(numbers: ra.Sender[int], count: int) -> None:
    with numbers:
        for number in range(count):
            await numbers.put(number)


@pytest.fixture
def delta(hosts: Hosts) -> Iterator[Callable[[], None]]:
    """A fourth host, of one accelerator, while the test runs; kills it."""
    node, left = hosts.add("delta", num_gpus=1), [True]

    def kill() -> None:
        if left:
            left.clear()
            hosts.kill(node)

    yield kill
    kill()


async def test_work_of_a_lost_host_goes_on_elsewhere(
    hosts: Hosts, delta: Callable[[], None]
) -> None:
    async with ra.Cluster.ray(address=hosts.address) as cluster:
        there = [at for at, one in enumerate(cluster.devices) if one.host == "delta"]
        teller = (await cluster.launch(Teller, placement=Ranks(there), restart=ra.Restart()))[0]
        assert cluster.host("Teller[0]") == "delta"
        pid = await teller.call(Teller.pid)
        await asyncio.to_thread(delta)
        await gone(pid)
        assert await teller.call(Teller.sees) != ""
        assert cluster.host("Teller[0]") in ("beta", "gamma")


async def test_ranks_of_a_lost_host_share_their_new_device_and_keep_it(
    hosts: Hosts, delta: Callable[[], None]
) -> None:
    async with ra.Cluster.ray(address=hosts.address) as cluster:
        there = [at for at, one in enumerate(cluster.devices) if one.host == "delta"]
        both = [
            (await cluster.launch(Teller, name=name, placement=Ranks(there), restart=ra.Restart()))[
                0
            ]
            for name in "PQ"
        ]
        pids = [await one.call(Teller.pid) for one in both]
        await asyncio.to_thread(delta)
        for pid in pids:
            await gone(pid)
        seen = [await one.call(Teller.sees) for one in both]
        assert cluster.host("P[0]") == cluster.host("Q[0]") in ("beta", "gamma")
        assert seen[0] == seen[1] != ""
        os.kill(await both[0].call(Teller.pid), signal.SIGKILL)
        assert await both[0].call(Teller.sees) == seen[0]
        free = [at for at, one in enumerate(cluster.devices) if one.host in ("beta", "gamma")]
        # All devices can be had: none was reserved twice.
        everything = await cluster.launch(Teller, name="rest", placement=Ranks([free]))
        assert len((await everything.call(Teller.sees))[0].split(",")) == len(free)


async def test_clusters_of_one_process_share_a_connection(hosts: Hosts) -> None:
    import ray

    async with AsyncExitStack() as second:
        async with ra.Cluster.ray(address=hosts.address):
            later = await second.enter_async_context(ra.Cluster.ray(address=hosts.address))
            with pytest.raises(BuildError, match=r"connected to Ray at .* already"):
                async with ra.Cluster.ray(address="127.0.0.1:1"):
                    raise AssertionError("it was entered")
            with pytest.raises(BuildError, match="runtime_env is given, but"):
                async with ra.Cluster.ray(runtime_env={"env_vars": {"A": "1"}}):
                    raise AssertionError("it was entered")
        teller = (await later.launch(Teller))[0]
        assert await teller.call(Teller.pid) > 0
    assert not ray.is_initialized()


async def test_a_connection_of_the_script_stays(hosts: Hosts) -> None:
    import ray

    await asyncio.to_thread(ray.init, address=hosts.address, logging_level=logging.ERROR)
    try:
        async with ra.Cluster.ray() as cluster:
            teller = (await cluster.launch(Teller))[0]
            assert await teller.call(Teller.pid) > 0
        assert ray.is_initialized()
    finally:
        ray.shutdown()


async def test_the_error_of_a_rank_whose_host_was_lost_says_so(
    hosts: Hosts, delta: Callable[[], None]
) -> None:
    with pytest.raises(ra.WorkerDied, match=r"Teller\[0\] .* on delta\).*: its host was lost"):
        async with ra.Cluster.ray(address=hosts.address) as cluster:
            there = [at for at, one in enumerate(cluster.devices) if one.host == "delta"]
            teller = (await cluster.launch(Teller, placement=Ranks(there)))[0]
            running = teller.call(Teller.forever)
            await asyncio.to_thread(delta)
            await running


async def test_devices_that_others_hold_are_reported_with_who_has_them(hosts: Hosts) -> None:
    async with ra.Cluster.ray(address=hosts.address) as first:
        await first.launch(Teller, name="Holder", placement=Ranks([[2, 3, 4, 5]]))
        with pytest.raises(BuildError) as refused:
            async with ra.Cluster.ray(address=hosts.address, wait=1.0) as second:
                await second.launch(Teller, count=2, placement=Packed(start=4))
        text = str(refused.value)
        assert "Teller asks for 2 GPU on beta, which was not free within 1 s" in text
        assert "Holder: 4 GPU on beta" in text
    async with ra.Cluster.ray(address=hosts.address, wait=0.0) as cluster:
        with pytest.raises(
            BuildError, match=r"asks for 2 robot, which no host has: of [34] hosts alpha has 2 CPU"
        ):
            await cluster.launch(Teller, resources={"robot": 2})


async def test_nothing_is_left(hosts: Hosts) -> None:
    import ray
    from ray.util.placement_group import placement_group_table

    async with ra.Cluster.ray(address=hosts.address) as cluster:
        tellers = await cluster.launch(Teller, count=2, placement=Packed(start=2))
        pids = await tellers.call(Teller.pid)
    assert not ray.is_initialized()
    for pid in pids:
        await gone(pid)
    ray.init(address=hosts.address, logging_level=logging.ERROR)
    try:
        states = {one["state"] for one in placement_group_table().values()}
        assert states <= {"REMOVED"}
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1'"),
        ("ray://127.0.0.1:10001", "A driver of Ray Client"),
        ("here", "is no address of a Ray cluster"),
    ],
)
async def test_an_address_that_cannot_be_used_is_refused_at_once(address: str, text: str) -> None:
    with pytest.raises(BuildError, match=text):
        async with ra.Cluster.ray(address=address):
            raise AssertionError("it was entered")


Unpicklable: Callable[[], None] = lambda: None  # noqa: E731


async def test_arguments_that_cannot_be_sent_are_named(hosts: Hosts) -> None:
    async with ra.Cluster.ray(address=hosts.address) as cluster:
        with pytest.raises(BuildError, match=r"Needy\[0\]#0: .* cannot be sent"):
            await cluster.launch(Needy, Unpicklable)


async def test_a_class_that_a_host_does_not_have_is_named(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_here = ModuleType("only_here")
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    only_here.Ghost = type("Ghost", (ra.Worker,), {"__module__": "only_here"})  # type: ignore[attr-defined]
    with pytest.raises(BuildError) as refused:
        async with ra.Cluster.ray(address=hosts.address) as cluster:
            await cluster.launch(only_here.Ghost)
    said = str(refused.value)
    assert "Ghost[0]" in said
    assert "cannot be imported: ModuleNotFoundError: No module named 'only_here'" in said
    assert "Install the package that defines them on every host, or ship it" in said


async def test_another_version_on_a_host_is_refused_by_name(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "versions", lambda: {"Python": "3.9", "rlinf_async": "0.0.9"})
    with pytest.raises(
        BuildError, match=r"Teller\[0\].* the driver has Python 3.9 and rlinf_async 0.0.9, but"
    ):
        async with ra.Cluster.ray(address=hosts.address) as cluster:
            await cluster.launch(Teller)


async def test_an_interpreter_that_is_not_there_or_has_other_versions_is_refused(
    hosts: Hosts, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_text("""#!/bin/sh\necho '{"Python": "3.9", "rlinf_async": "0.0.9"}'\n""")
    other.chmod(0o755)
    async with ra.Cluster.ray(address=hosts.address) as cluster:
        for command, wrong in ((str(other), "it has Python 3.9 and"), ("/no/python", "cannot be")):
            with pytest.raises(BuildError, match=rf"Teller\[0\] on .*'{command}': .*{wrong}"):
                await cluster.launch(Teller, runtime_env={"py_executable": command})
        teller = (await cluster.launch(Teller, runtime_env={"py_executable": sys.executable}))[0]
        assert await teller.call(Teller.pid) > 0


async def test_the_interpreter_of_a_whole_cluster_is_asked_as_that_of_a_role(hosts: Hosts) -> None:
    env = {"py_executable": "/no/python"}
    async with ra.Cluster.ray(address=hosts.address, runtime_env=env) as cluster:
        with pytest.raises(BuildError, match=r"Teller\[0\] on .*'/no/python': it cannot be run"):
            await cluster.launch(Teller)
        own = {"py_executable": sys.executable}
        teller = (await cluster.launch(Teller, runtime_env=own, name="own"))[0]
        assert await teller.call(Teller.pid) > 0


async def two_hosts(cluster: ra.Cluster) -> list[ra.WorkerRef[Counting]]:
    """A worker on beta, and one on gamma."""
    first = {one.host: at for at, one in reversed([*enumerate(cluster.devices)])}
    return [
        (await cluster.launch(Counting, name=name, placement=Ranks([first[host]])))[0]
        for name, host in (("home", "beta"), ("other", "gamma"))
    ]


async def test_a_queue_lives_with_a_worker_of_another_host(hosts: Hosts) -> None:
    async with ra.Cluster.ray(address=hosts.address, tls=True) as cluster:
        home, other = await two_hosts(cluster)
        numbers = await cluster.channel_at(home, Number, name="numbers", capacity=7)
        back = await cluster.channel_at(other, Number, name="back")
        taking = home.call(Counting.take, numbers.receiver)
        putting = home.call(Counting.put, back.sender, 30)
        await other.call(Counting.put, numbers.sender, 50)
        assert await taking == [*range(50)]
        with back.receiver as receiver:
            assert [number.value async for number in receiver] == [*range(30)]
        await putting
        assert (await numbers.statistics()).gets == 50


async def test_a_home_on_ray_that_dies_is_said_to_those_who_use_it(hosts: Hosts) -> None:
    async def graph() -> None:
        async with ra.Cluster.ray(address=hosts.address) as cluster:
            home, other = await two_hosts(cluster)
            numbers = await cluster.channel_at(home, Number, name="numbers", capacity=7)
            taking = other.call(Counting.take, numbers.receiver)
            await numbers.sender.put(Number(1))
            os.kill(await home.call(Counting.pid), signal.SIGKILL)
            await taking

    with pytest.raises(ra.WorkerDied, match=r"home\[0\] .* on beta"):
        await graph()


class Needy(ra.Worker):
    def __init__(self, thing: object) -> None:
        self.thing = thing


SCRIPT = """
import asyncio
import rlinf_async as ra
from tests.runtime.kit import Parent

async def main() -> None:
    async with ra.Cluster.ray(address="ADDRESS") as cluster:
        parents = await cluster.launch(Parent, count=2)
        for child in await parents.call(Parent.started):
            print("child", child)
        for rank in range(2):
            print("worker", cluster.pid(f"Parent[{rank}]"))
        print("ready", flush=True)
        await parents.call(Parent.forever)

if __name__ == "__main__":
    ra.run(main())
"""


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, -2), (signal.SIGTERM, 143)]
)
def test_a_driver_that_ends_leaves_no_process_and_no_folder(
    hosts: Hosts, sent: signal.Signals, code: int
) -> None:
    with running(SCRIPT.replace("ADDRESS", hosts.address)) as script:
        script.wait_for("ready")
        os.kill(script.process.pid, sent)
        ended, lines, errors = script.end()
        assert ended == code, errors
        assert "SIGTERM received" not in errors  # by Ray's C++, which kills the process soon after
        pids = [int(line.split()[1]) for line in lines if line.startswith(("child ", "worker "))]
        assert len(pids) == 4
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).wait()
        assert script.gone()
        assert script.left == []


def test_sigterm_ends_a_run_whose_script_has_connected_to_ray(hosts: Hosts) -> None:
    connect = f'import ray; ray.init("{hosts.address}")\n    async with ra.Cluster.ray('
    script = SCRIPT.replace("async with ra.Cluster.ray(", connect)
    with running(script.replace("ADDRESS", hosts.address)) as started:
        started.wait_for("ready")
        os.kill(started.process.pid, signal.SIGTERM)
        ended, _, errors = started.end()
        assert ended == 143, errors
        assert "SIGTERM received" not in errors
