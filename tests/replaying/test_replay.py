"""A worker that is played again gets what it got, and what it puts is compared exactly."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlinf_async import Cluster, Restart, WorkerError, run
from rlinf_async.config import UsageError
from rlinf_async.replaying import ReplayReport, playing, replay
from rlinf_async.testing import VirtualLoop
from rlinf_async.testing import run as virtual
from tests.replaying import workers
from tests.replaying.conftest import LIMIT, add, drain, record
from tests.replaying.workers import (
    Adder,
    Blob,
    Follower,
    Keeping,
    Learner,
    Number,
    Passing,
    Weights,
)


def again(folder: Path, only: str = "adder", **options: object) -> ReplayReport:
    """The report of a replay."""
    return run(replay(folder, only, **options))  # type: ignore[arg-type]


def test_a_worker_played_again_alone_is_equal_and_says_how_much_was_compared(added: Path) -> None:
    report = again(added, tolerance=0.0)
    assert report.equal
    assert (report.worker, report.items, report.calls, report.lives) == ("Adder[0]", 50, 1, 1)
    assert report.compared == 50 * 3 + 1  # three fields of each, and the result
    assert (report.forced, report.overlapped, report.largest) == (0, 0, 0.0)


def test_a_worker_of_a_process_is_played_again_in_this_one(tmp_path: Path) -> None:
    run(record(tmp_path, kind="process"))
    report = again(tmp_path, tolerance=0.0)
    assert report.equal
    assert report.items == 50
    assert report.forced == 0


def test_the_first_difference_is_named_with_channel_item_field_and_both_values(
    added: Path,
) -> None:
    workers.drift = 0.25
    report = again(added)
    found = report.first_difference
    assert found is not None
    assert not report.equal
    assert (found.where, found.index, found.path) == ("channel 'sums'", 1, ".value")
    assert (found.recorded, found.replayed, found.iteration) == ("0.0", "0.25", 0)
    assert report.differences == 50


def test_numbers_may_differ_by_the_tolerance_and_not_by_more(added: Path) -> None:
    workers.drift = 1e-7
    report = again(added, tolerance=1e-6)
    assert report.equal
    assert 0 < report.largest <= 1.1e-7
    assert not again(added, tolerance=1e-8).equal
    assert not again(added, tolerance=0.0).equal


@pytest.mark.parametrize(("extra", "number"), [(2, 2), (-1, 5)])
def test_items_that_are_too_many_or_missing_are_differences(
    added: Path, extra: int, number: int
) -> None:
    workers.surplus = extra
    report = again(added)
    found = report.first_difference
    assert found is not None
    assert report.differences == number
    assert (found.recorded if extra > 0 else found.replayed) == "nothing"


def test_what_was_before_an_iteration_is_played_and_not_compared(added: Path) -> None:
    report = again(added, first=7)
    assert report.equal
    assert (report.items, report.skipped) == (15, 35)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"only": "nobody"}, "no such worker was recorded"),
        ({"only": "adder:3"}, "there are Adder"),
        ({"only": "adder:x:y"}, "name a role and a rank"),
        ({"only": "adder", "first": 10}, "iterations 0 to 9"),
        ({"only": "adder", "start": 4}, "start 4 was not recorded"),
        ({"only": "adder", "tolerance": -1.0}, "a number from 0"),
        ({"only": "adder", "tolerance": math.nan}, "a number from 0"),
        ({"only": "adder", "verifier": "exact"}, "--only reward"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    added: Path, options: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        again(added, **options)  # type: ignore[arg-type]


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--record all"):
        again(tmp_path)
    (tmp_path / "begun" / "recording" / "1").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"nothing is written in .*/recording/1 yet"):
        again(tmp_path / "begun")
    with pytest.raises(UsageError, match="no such folder"):
        again(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"no bundle")
    with pytest.raises(UsageError, match="is no bundle"):
        again(tmp_path / "file")


def test_batches_of_a_key_and_of_a_stealing_channel_are_those_of_the_recording(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with Cluster.process() as cluster:
            cluster.record_into(tmp_path / "recording" / "1", ["all"], LIMIT)
            numbers = cluster.channel(Number, name="numbers", stealing=True)
            sums = cluster.channel(Number, name="sums")
            group = await cluster.launch(Adder, name="Adder")
            calls = [
                group[0].call(Adder.batches, numbers.receiver, sums.sender, key) for key in (0, 1)
            ]
            draining = asyncio.create_task(drain(sums, [0, 1]))
            with numbers.sender as sender:
                for at in range(60):
                    await sender.put(Number(float(at), at), key=at % 3)  # 2 is nobody's
                    if at % 7 == 0:
                        await asyncio.sleep(0)
            assert sum([await call for call in calls]) > 0
            assert sum(one.iteration for one in await draining) == 60

    run(main())
    report = again(tmp_path, tolerance=0.0)
    assert report.equal
    assert report.calls == 2
    assert report.forced == 0


def test_leases_that_failed_are_delivered_again_as_often_as_they_were(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster.local() as cluster:
            cluster.record_into(tmp_path / "recording" / "1", ["all"], LIMIT)
            numbers = cluster.channel(Number, name="numbers", capacity=64)
            sums = cluster.channel(Number, name="sums", capacity=64)
            group = await cluster.launch(Adder, name="Adder")
            with numbers.sender as sender:
                for at in range(20):
                    await sender.put(Number(float(at), at // 5, at))
                call = group[0].call(Adder.leases, numbers.receiver, sums.sender)
            assert max(await call) == 2

    run(main())
    report = again(tmp_path, tolerance=0.0)
    assert report.equal
    assert report.items > 0
    assert report.forced == 0


def test_what_is_taken_without_waiting_is_there_when_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster.local() as cluster:
            cluster.record_into(tmp_path / "recording" / "1", ["all"], LIMIT)
            numbers = cluster.channel(Number, name="numbers")
            sums = cluster.channel(Number, name="sums", capacity=64)
            group = await cluster.launch(Adder, name="Adder")
            call = group[0].call(Adder.poll, numbers.receiver, sums.sender, 30)
            with numbers.sender as sender:
                for at in range(30):
                    await sender.put(Number(float(at), at))
                await call

    run(main())
    report = again(tmp_path, tolerance=0.0)
    assert report.equal
    assert report.items == 30


def test_calls_one_after_the_other_and_published_values_are_compared(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster.process() as cluster:
            cluster.record_into(tmp_path / "recording" / "1", ["all"], LIMIT)
            numbers = cluster.channel(Number, name="numbers")
            asked = cluster.channel(Number, name="asked")
            products = cluster.channel(Number, name="products", capacity=64)
            weights = cluster.latest(Weights, name="weights")
            learners = await cluster.launch(Learner)
            followers = await cluster.launch(Follower)
            following = followers[0].call(
                Follower.follow, asked.receiver, products.sender, weights.receiver
            )
            with numbers.sender as sender, asked.sender as asking, numbers.receiver:
                for iteration in range(4):
                    call = learners[0].call(Learner.learn, numbers.receiver, 3, weights.sender)
                    for at in range(3):
                        await sender.put(Number(0.1 * at, iteration))
                    await call
                    for at in range(5):
                        await asking.put(Number(float(at), iteration, iteration + 1))
            assert await following == 20

    run(main())
    learner = again(tmp_path, "learner", tolerance=0.0)
    assert learner.equal
    assert learner.calls == 4
    assert learner.items == 4
    follower = again(tmp_path, "Follower[0]", tolerance=0.0)
    assert follower.equal
    assert follower.items == 20
    workers.drift = 1e-3
    found = again(tmp_path, "learner").first_difference
    assert found is not None
    assert (found.where, found.path) == ("channel 'weights'", ".data[0]")


def test_an_error_of_the_worker_is_the_same_error_again(tmp_path: Path) -> None:
    run(fail(tmp_path))
    report = again(tmp_path)
    assert report.equal
    assert report.error == "ValueError: a number of iteration 3 is negative"


async def fail(folder: Path) -> None:
    """A run whose worker fails in iteration 3."""
    with pytest.raises(WorkerError, match="is negative"):
        await _fail(folder)


async def _fail(folder: Path) -> None:
    async with Cluster.local() as cluster:
        cluster.record_into(folder / "recording" / "1", ["all"], LIMIT)
        numbers = cluster.channel(Number, name="numbers")
        sums = cluster.channel(Number, name="sums", capacity=64)
        group = await cluster.launch(Adder, name="Adder")
        with numbers.sender as sender:
            call = group[0].call(Adder.run_failing, numbers.receiver, sums.sender)
            for at in range(40):
                await sender.put(Number(-1.0 if at == 35 else float(at), at // 10))
            await call


def test_a_worker_that_died_and_was_started_again_is_played_life_by_life(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster.process() as cluster:
            cluster.record_into(tmp_path / "recording" / "1", ["all"], LIMIT)
            numbers = cluster.channel(Number, name="numbers")
            sums = cluster.channel(Number, name="sums", capacity=64)
            group = await cluster.launch(Adder, name="Adder", restart=Restart())
            with numbers.sender as sender, sums.receiver as receiver:
                call = group[0].call(Adder.run, numbers.receiver, sums.sender)
                for _ in range(5):
                    await sender.put(Number(1.0, 0))
                    await receiver.get(key=0)
                process = cluster._backend.process("Adder[0]")
                assert process is not None
                process.kill()
                for at in range(5):
                    await sender.put(Number(1.0, 1, at))
                    await receiver.get(key=1)
                sender.close()
                await call

    run(main())
    report = again(tmp_path, tolerance=0.0)
    assert report.equal
    assert (report.lives, report.items) == (2, 10)


@pytest.mark.parametrize(("share", "lasts"), [(0.0, True), (0.9, False)])
def test_a_worker_that_waits_for_a_core_is_not_taken_for_one_that_is_stuck(
    monkeypatch: pytest.MonkeyPatch, share: float, lasts: bool
) -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        monkeypatch.setattr(playing, "family", lambda: [1])
        monkeypatch.setattr(playing, "worked", lambda _: {7: int(share * clock() * 1e9)})
        idle = playing._Idle(cast("Any", SimpleNamespace(moves=3)))
        assert not idle.lasts(stands_still=False)
        await asyncio.sleep(playing.PATIENCE + 0.1)
        assert idle.lasts(stands_still=False) == lasts

    virtual(main())


def test_threads_that_wait_for_a_core_have_worked() -> None:
    """Another process computes on the only core that this one may use: it waits as long."""
    core = sorted(os.sched_getaffinity(0))[0]
    script = f"import os\nos.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        before = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, [core])
            began, computed = playing.worked([os.getpid()]), time.process_time_ns()
            while time.process_time_ns() < computed + 50_000_000:
                pass
            found = playing.worked([os.getpid()])
        finally:
            os.sched_setaffinity(0, before)
            other.kill()
    own = threading.get_native_id()
    assert found[own] - began[own] > 1.2 * 50_000_000


def test_it_is_played_in_virtual_time_too(added: Path) -> None:
    loop = VirtualLoop()
    try:
        report = loop.run_until_complete(replay(added, "adder"))
    finally:
        loop.close()
    assert report.equal
    assert report.items == 50


def test_ranks_that_compute_together_are_refused_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster.process() as cluster:
            cluster.record_into(tmp_path / "recording" / "1", ["all"], LIMIT)
            await cluster.launch(Adder, count=2, collective="gloo", name="Adder")

    run(main())
    with pytest.raises(UsageError, match=r"Adder\[1\] computes together with the other 1 ranks"):
        again(tmp_path, "adder:1")


def test_a_channel_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster.local() as cluster:
            cluster.record_into(tmp_path / "recording" / "1", ["numbers"], LIMIT)
            await add(cluster, iterations=2)

    run(main())
    with pytest.raises(UsageError, match=r"an end of channel 'sums', which was not recorded"):
        again(tmp_path)


# ---- a recording whose beginning was deleted for its limit


async def pass_blobs(folder: Path, cls: type[Keeping], *, at_once: bool = False) -> None:
    """A run of 60 items that are larger than the limit together: one after the other is put when
    the one before is done, or all before the first is taken."""
    async with Cluster.local() as cluster:
        cluster.record_into(folder / "recording" / "1", ["all"], 1_000_000)
        blobs = cluster.channel(Blob, name="blobs", capacity=64)
        ends = cluster.channel(Number, name="ends")
        group = await cluster.launch(cls, name="Passing")
        recorder = cluster.recorder
        assert recorder is not None
        call = None if at_once else group[0].call(cls.run, blobs.receiver, ends.sender)
        with blobs.sender as sender:
            for at in range(60):
                await sender.put(Blob(os.urandom(30_000), at))
                if not at_once:
                    await ends.receiver.get()
                assert recorder.flush()
            if call is None:
                call = group[0].call(cls.run, blobs.receiver, ends.sender)
                for _ in range(60):
                    await ends.receiver.get()
        await call


def test_a_worker_without_a_state_is_played_from_where_a_recording_begins(tmp_path: Path) -> None:
    run(pass_blobs(tmp_path, Passing))
    report = again(tmp_path, "passing")
    assert report.equal
    assert 5 < report.items < 50


def test_a_recording_that_ended_before_the_run_is_said_to_have(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster.local() as cluster:
            cluster.record_into(tmp_path / "recording" / "1", ["all"], LIMIT)
            numbers = cluster.channel(Number, name="numbers")
            sums = cluster.channel(Number, name="sums", capacity=64)
            group = await cluster.launch(Adder, name="Adder")
            call = group[0].call(Adder.run, numbers.receiver, sums.sender)
            recorder = cluster.recorder
            assert recorder is not None
            for at in range(10):
                await numbers.sender.put(Number(1.0, 0, at))
                await sums.receiver.get(key=0)
                if at == 4:
                    assert recorder.flush()
                    recorder._end_early("no space left on the device")
            numbers.sender.close()
            await call

    run(main())
    report = again(tmp_path)
    assert report.equal
    [note] = [one for one in report.notes if "ended before the run" in one]
    assert "missing: no space left on the device" in note


@pytest.mark.parametrize(
    ("cls", "at_once", "said"),
    [
        (
            Keeping,
            False,
            r"begins with event \d+: .* Passing\[0\] has a state that came from there",
        ),
        (Passing, True, r"deleted .* what Passing\[0\] was given from channel 'blobs' came from"),
    ],
)
def test_what_came_from_the_part_that_was_deleted_is_named(
    tmp_path: Path, cls: type[Keeping], at_once: bool, said: str
) -> None:
    run(pass_blobs(tmp_path, cls, at_once=at_once))
    with pytest.raises(UsageError, match=said):
        again(tmp_path, "passing")
