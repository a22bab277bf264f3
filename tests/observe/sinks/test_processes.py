"""Sinks in processes of their own: none of what happens to one reaches the run."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.sinks import process as process_module
from rlinf_async.observe.sinks.config import ObserveConfig
from rlinf_async.observe.sinks.opened import OpenSinks
from rlinf_async.observe.sinks.part import SinkRun
from rlinf_async.observe.sinks.process import SinkProcess

PART = "tests.observe.sinks.parts:Part"
DIES = "tests.observe.sinks.parts:Dies"
KILLED = f"""
import os, sys
from rlinf_async.observe.sinks.config import ObserveConfig
from rlinf_async.observe.sinks.opened import OpenSinks
from rlinf_async.observe.sinks.part import SinkRun
from pathlib import Path
sinks = OpenSinks(
    ObserveConfig(sinks=({PART!r},), options={{{PART!r}: {{"hangs": sys.argv[2] == "hangs"}}}}),
    SinkRun(folder=sys.argv[1], name="run"),
)
sinks.begin(Path(sys.argv[1]), None)
sinks.write(1, {{"loss": 2.0}})
print(sinks._apart[0]._process.pid, flush=True)
sys.stdin.read()
"""


def opened(folder: Path, name: str = PART, **settings: Any) -> OpenSinks:
    options = {name: settings} if settings else {}
    observe = ObserveConfig(sinks=(name,), options=options)
    return OpenSinks(observe, SinkRun(folder=str(folder), name="run"))


def process_of(sinks: OpenSinks) -> SinkProcess:
    [one] = sinks._apart
    return one


def lines(folder: Path) -> list[Any]:
    file = folder / "sinks" / "rows.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def until(condition: Callable[[], object]) -> None:
    """Wait for another process; the limit is that of a test."""
    while not condition():
        time.sleep(0.02)


def test_rows_and_the_outcome_reach_a_sink_of_the_users_own(tmp_path: Path) -> None:
    sinks = opened(tmp_path)
    with MetricsWriter(tmp_path, sinks=sinks) as writer:
        writer.write(1, {"loss": 2.0})
        writer.write(2, {"loss": 1.0})
    sinks.close("failed")
    assert lines(tmp_path) == [[1, {"loss": 2.0}], [2, {"loss": 1.0}], "failed"]
    assert (tmp_path / "sinks" / f"{PART}.log").read_text() == "opened\n"


def test_rows_that_a_sink_does_not_take_wait_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = tmp_path / "gate"
    sinks = opened(tmp_path, gate=str(gate))
    with MetricsWriter(tmp_path, sinks=sinks) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": 1.0})
        until(lambda: caplog.records)
        gate.touch()
        until(lambda: len(caplog.records) == 2)
    sinks.close("finished")
    failed = f"metrics sink {PART!r} failed: ConnectionError: the server is gone"
    assert [one.message for one in caplog.records] == [
        f"{failed}; the run goes on, and rows wait for it",
        f"metrics sink {PART!r} takes rows again",
    ]
    assert lines(tmp_path) == [*([step, {"loss": 1.0}] for step in (1, 2, 3)), "finished"]


def test_what_an_earlier_start_could_not_hand_over_is_taken_from_the_csv(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    sinks = opened(tmp_path, gate=str(gate))
    with MetricsWriter(tmp_path, sinks=sinks) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": 1.0})
    sinks.close("failed")
    assert "did not take 3 rows" in caplog.text
    gate.touch()
    sinks = opened(tmp_path, gate=str(gate))
    with MetricsWriter(tmp_path, resume_at=2, sinks=sinks) as writer:
        writer.write(3, {"loss": 0.0})
    sinks.close("finished")
    rows = [[1, {"loss": 1.0}], [2, {"loss": 1.0}], [3, {"loss": 0.0}]]
    assert lines(tmp_path) == ["failed", *rows, "finished"]


def test_a_sink_that_hangs_holds_nothing_up_and_is_ended_with_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(process_module, "MARGIN", 0.5)
    sinks = opened(tmp_path, hangs=True)
    child = psutil.Process(process_of(sinks)._process.pid)
    state = tmp_path / "sinks" / f"{PART}.json"
    with MetricsWriter(tmp_path, sinks=sinks) as writer:
        writer.write(0, {"loss": 1.0})
        until(lambda: state.exists() and json.loads(state.read_text())["step"] == 0)
        for step in range(1, 20_000):  # more than are kept
            writer.write(step, {"loss": 1.0})
    sinks.close("finished")
    assert not child.is_running()
    assert "did not end within 0.5 s" in caplog.text


def test_a_process_that_dies_is_said_with_its_cause_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    sinks = opened(tmp_path, DIES)
    with MetricsWriter(tmp_path, sinks=sinks) as writer:
        until(lambda: caplog.records)
        writer.write(1, {"loss": 1.0})
    sinks.close("finished")
    ended = f"the process of metrics sink {DIES!r} has ended (killed by SIGKILL)"
    rest = f"the run goes on without it, and sinks/{DIES}.log has what it printed"
    assert [one.message for one in caplog.records] == [f"{ended}; {rest}"]


@pytest.mark.parametrize("how", ["takes", "hangs"])
def test_a_kill_of_the_run_leaves_no_process(tmp_path: Path, how: str) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with run:
        assert run.stdout is not None
        child = psutil.Process(int(run.stdout.readline()))
        if how == "takes":
            until(lambda: lines(tmp_path))
        run.kill()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    if how == "takes":
        assert lines(tmp_path) == [[1, {"loss": 2.0}], "killed"]
