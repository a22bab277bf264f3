"""The channels bench: what its sides share, and its own cases run for real."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import pathlib
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest

from benchmarks.channels import kit, memory
from benchmarks.harness.report import run_bench
from benchmarks.harness.run import BENCHMARKS, SKIPPED, bench_named


def test_the_small_message_has_64_bytes() -> None:
    assert len(msgspec.msgpack.encode(kit.ITEM)) == 64


def test_a_producer_sends_arrays_in_turn_that_no_cache_holds() -> None:
    elements = kit.ARRAYS["4mb"]
    taken = list(itertools.islice(kit.sources(elements), kit.SOURCES // (4 * elements) + 1))
    assert len({id(array) for array in taken}) == len(taken) - 1
    assert taken[-1] is taken[0]


def test_a_torn_array_is_noticed() -> None:
    kit.touch(np.array([1.0, 2.0, 1.0]))
    with pytest.raises(ValueError, match="torn"):
        kit.touch(np.array([1.0, 1.0, 2.0]))


def test_percentiles_are_in_microseconds() -> None:
    assert kit.percentiles([0.001 * n for n in range(1, 101)]) == {
        "p50_us": pytest.approx(51_000),
        "p99_us": pytest.approx(100_000),
    }


def test_a_rate_counts_what_was_taken_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(step=0.1)  # seconds: the clock is read before every take
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    taken = []

    async def take() -> None:
        taken.append(1)

    rate = asyncio.run(kit.rate(take, every=2))
    assert rate == pytest.approx(20, rel=0.1)
    assert len(taken) > kit.SECONDS * 20


@pytest.mark.slow
def test_our_cases_run_and_are_held_against_the_raw_socket(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "found.json"
    run_bench(
        bench_named("channels"),
        with_peers=False,
        cases=["echo", "items: raw", "items: ours"],
        repetitions=1,
        json_file=file,
    )
    found = msgspec.json.decode(file.read_bytes())
    assert [case["gap"] for case in found["cases"].values()] == [""] * 4
    assert {bar["bar"] for bar in found["bars"] if bar["value"] is not None} == {
        "64-byte items/s / raw socket",
        "round trip, p50 / raw socket echo",
        "round trip, p99 / p50",
    }


@pytest.mark.slow
@pytest.mark.parametrize("cable", ["good", "bad"])
@pytest.mark.parametrize("what", ["ours", "raw", "past"])
def test_two_hosts_are_measured_or_it_is_said_why_not(what: str, cable: str) -> None:
    root = BENCHMARKS.parent
    command = [sys.executable, "benchmarks/channels/hosts.py", what, cable]
    environment = {**os.environ, "PYTHONPATH": str(root), "RLINF_ASYNC_BENCH_BRIEF": "1"}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr)
    found = msgspec.json.decode(done.stdout)
    assert done.returncode == 0, done.stderr
    if what == "past":
        assert found["gb_per_s_through"] > 0
        assert found["gb_per_s_past"] > 0
        assert found["owner_cores_per_gb_per_s_past"] > 0
        return
    assert found["p50_us"] > (40_000 if cable == "bad" else 0)
    assert found["items_per_s"] > 0
    assert found["gb_per_s_256kb" if cable == "bad" else "gb_per_s_4mb"] > 0


@pytest.mark.parametrize("script", sorted((BENCHMARKS / "channels").glob("of_*.py")))
def test_a_peers_driver_needs_nothing_of_ours(script: pathlib.Path) -> None:
    assert "rlinf_async" not in script.read_text(encoding="utf-8")


def test_what_the_sides_share_needs_nothing_of_ours() -> None:
    program = (
        "import sys; from benchmarks.channels import kit; sys.exit('rlinf_async' in sys.modules)"
    )
    root = BENCHMARKS.parent
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0


def test_the_memory_case_sees_what_a_process_holds() -> None:
    before = memory.resident_mb_of([os.getpid()])
    with mmap.mmap(-1, 100 << 20) as held:  # an array may lie in what the allocator has kept
        held[:: mmap.PAGESIZE] = b"\x01" * (len(held) // mmap.PAGESIZE)
        after = memory.resident_mb_of([os.getpid()])
    assert after - before == pytest.approx(100 * 1.048576, abs=20)
