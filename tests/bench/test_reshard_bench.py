"""The cases of the reshard bench run, small, and measure what the bars ask for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.run import BENCHMARKS, bench_named


def run(script: str, folder: Path, *more: str) -> dict[str, float]:
    """The line that a case prints for a small model."""
    command = [sys.executable, str(BENCHMARKS / "reshard" / script), str(folder), *more]
    done = subprocess.run(
        [*command, "--parameters", "16e6"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_live_rescale_gives_back_what_was_there_and_its_memory_is_measured_in_buckets(
    tmp_path: Path,
) -> None:
    found = run("live.py", tmp_path, "--memory")
    assert found["seconds"] > 0
    # Half of the state changes hands on the way up, and again on the way down.
    assert found["sent_bytes"] >= 2 * 3 * 4 * 2**23
    assert -4 < found["buckets_per_rank_to_4"] < 4


def test_new_shards_are_touched_alone_beside_a_live_rescale(tmp_path: Path) -> None:
    found = run("touch.py", tmp_path)
    # Half of the state, on the way up and down: the rest lies where it was.
    assert found["touched_bytes"] == 2 * 3 * 4 * 2**23
    assert found["seconds"] == pytest.approx(found["seconds_2_to_4"] + found["seconds_4_to_2"])
    assert found["live_over_touch"] == pytest.approx(found["live_seconds"] / found["seconds"])


def test_a_restart_through_a_checkpoint_is_slower_than_its_own_save(tmp_path: Path) -> None:
    found = run("restart.py", tmp_path)
    assert found["seconds"] > found["save_seconds"] > 0


def test_megatron_changes_its_strategy_live_and_holds_what_it_had(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    found = run("strategies.py", tmp_path)
    assert min(found["seconds_to_tp2pp2dp1"], found["seconds_to_tp1pp1dp2"]) > 0
    assert found["sent_bytes"] > 0


def test_a_pair_of_ranks_is_measured_beside_memcpy(tmp_path: Path) -> None:
    found = run("pair.py", tmp_path)
    assert 0 < found["bytes_per_second"] <= found["best_bytes_per_second"]


def test_every_bar_is_measured_from_a_case_of_the_bench() -> None:
    bench = bench_named("reshard")
    names = {case.name for case in bench.cases}
    assert all(set(bar.cases) <= names for bar in bench.bars)
