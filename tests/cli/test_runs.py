"""``status`` and ``stop`` as a user meets them: what they print, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rlinf_async.cli import runs
from rlinf_async.observe.progress import ProgressState, WorkerView
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.run_lock import Driver
from rlinf_async.observe.status import RunResult, RunState, Status, write_status
from tests.cli.conftest import CommandLine
from tests.observe.holding import holding

SHOWN = ProgressState(run="reach", iteration=3, workers=[WorkerView(name="Env[11]", host="alpha")])
STATUS = Status(time=0.0, ending=False, grace_seconds=600.0, shown=SHOWN)
GOING = RunState(folder="runs/a", state="running", host="alpha", pid=7, here=True, seconds_ago=0.4)
KILLED = msgspec.structs.replace(GOING, state="killed", seconds_ago=200.0)
DONE = RunResult(outcome="finished", iterations=3, train_seconds=1.25)
FAILED = msgspec.structs.replace(DONE, outcome="failed", error="Env[0] died")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a run would be that was not named."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "a"


@pytest.fixture
def driver(run: Path) -> Iterator[subprocess.Popen[str]]:
    """The process of this run."""
    with holding(run) as process:
        yield process


RESUME = "go on with it: rlinf-async train FILE.toml --resume --out runs/a"
LATE = "the process is busy or stopped, or cannot write there"
UNSEEN = "or its lock is not seen from this host"
NO_SUMMARY = "no run goes on there, and none has come as far as to leave a summary"
TOLD = [
    (GOING, "running, process 7 on alpha, seen 0.4 s ago"),
    (
        msgspec.structs.replace(GOING, seconds_ago=90.0),
        f"running, process 7 on alpha, seen 2 min ago ({LATE})",
    ),
    (
        msgspec.structs.replace(GOING, state="starting", seconds_ago=None),
        "starting, process 7 on alpha",
    ),
    (KILLED, f"killed, process 7 on alpha holds it no longer; last seen 3 min ago; {RESUME}"),
    (
        msgspec.structs.replace(KILLED, here=False, seconds_ago=None),
        f"killed, process 7 on alpha holds it no longer ({UNSEEN}); {RESUME}",
    ),
    (
        RunState(folder="runs/a", state="ended", result=DONE),
        "finished after 3 iterations and 1.2 s of training",
    ),
    (
        RunState(folder="runs/a", state="ended", result=FAILED),
        "failed after 3 iterations and 1.2 s of training: Env[0] died",
    ),
    (RunState(folder="runs/a", state="ended"), NO_SUMMARY),
]


@pytest.mark.parametrize(("seen", "told"), TOLD)
def test_the_state_of_a_run_is_told_in_a_sentence(seen: RunState, told: str) -> None:
    assert runs._sentence(seen) == f"runs/a: {told}"


def test_status_shows_the_newest_run_as_a_picture_and_as_json(
    command_line: CommandLine, run: Path, driver: subprocess.Popen[str]
) -> None:
    write_status(run / "status.json", STATUS)
    code, out, _ = command_line.run("status")
    assert code == 0
    assert out.startswith(f"runs/a: running, process {driver.pid} on {os.uname().nodename}, seen")
    assert "Env[11]  alpha" in out
    code, out, _ = command_line.run("status", run, "--json")
    assert (code, json.loads(out)["status"]["shown"]["workers"][0]["host"]) == (0, "alpha")


def test_a_run_that_is_ending_is_waited_for_and_not_signalled_again(
    command_line: CommandLine,
    run: Path,
    driver: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = []

    def wait(of: Driver, seconds: float) -> bool:
        limits.append(seconds)
        driver.communicate()
        return True

    monkeypatch.setattr(Driver, "wait", wait)
    write_status(run / "status.json", msgspec.structs.replace(STATUS, ending=True))
    code, _, err = command_line.run("stop")
    assert (code, driver.returncode, limits) == (0, 0, [610.0])
    assert "runs/a: it is ending already" in err


@pytest.mark.parametrize("made", [True, False])
def test_a_run_that_leaves_nothing_because_it_had_not_begun_is_stopped_all_the_same(
    command_line: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    def wait(of: Driver, seconds: float) -> bool:
        held.communicate()
        shutil.rmtree(run)
        if not made:  # the folder was there before
            run.mkdir()
        return True

    monkeypatch.setattr(Driver, "wait", wait)
    with holding(run) as held:
        code, out, _ = command_line.run("stop", run)
    assert (code, out) == (0, f"{run}: stopped before it had begun, nothing is left of it\n")


def test_a_run_that_does_not_end_in_its_time_fails_the_command(
    command_line: CommandLine, driver: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "wait", lambda of, seconds: False)
    code, _, err = command_line.run("stop")
    assert code == 1
    assert f"error: process {driver.pid} still runs in runs/a; kill -KILL {driver.pid}" in err


@pytest.mark.parametrize("command", ["status", "stop"])
@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("absent", "absent: there is no such folder; name that of a run"),
        ("file", "file is a file; name the folder of a run"),
        (".", ". is not the folder of a run (it has no run.json of one)"),
        (None, "there is no run below "),
    ],
)
def test_what_is_not_a_run_is_wrong_input(
    command_line: CommandLine, run: Path, command: str, folder: str | None, said: str
) -> None:
    Path("file").touch()
    code, out, err = command_line.run(command, *([folder] if folder else []))
    assert (code, out) == (2, "")
    assert f"error: {said}" in err


def test_a_run_that_has_ended_cannot_be_stopped(command_line: CommandLine, run: Path) -> None:
    RunFolder.create(run, config_text="").close()
    code, _, err = command_line.run("stop", run)
    assert code == 2
    assert f"error: there is nothing to stop: {run}: no run goes on there" in err


def test_a_status_of_another_version_is_a_clear_error(
    command_line: CommandLine, run: Path, driver: subprocess.Popen[str]
) -> None:
    (run / "status.json").write_text('{"time": "noon"}')
    code, _, err = command_line.run("status")
    assert code == 2
    assert "status.json cannot be read" in err
    assert "another version of rlinf_async?" in err
