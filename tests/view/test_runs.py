"""What is told of runs: of those that go on, have ended, are damaged, or are gone."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlinf_async.cli import main
from rlinf_async.config import UsageError
from rlinf_async.observe.metrics import CsvLog
from rlinf_async.view.graph import NewestWaits
from rlinf_async.view.runs import Runs
from rlinf_async.view.server import listener
from rlinf_async.view.table import Table
from tests.view.kit import CONFIG, entered, keep_waits, make_run

ROWS = [{"loss": 1.0 / (1 + i), "reward": float(i)} for i in range(5)]
HOLD = """
import sys
from pathlib import Path
from tests.view.kit import going_on
with going_on(Path(sys.argv[1])):
    print("runs", flush=True)
    sys.stdin.read()
"""


def states(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {run["name"]: run for run in client.get("/api/state").json()["runs"]}


def test_the_age_of_a_run_counts_from_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "old", ROWS)
    an_hour_ago = time.time() - 3600
    os.utime(run / "summary.json", (an_hour_ago, an_hour_ago))
    (run / "notes.txt").write_text("written today")
    [state] = [one.state() for one in Runs([run]).all()]
    assert (state["state"], state["iteration"], state["live"]) == ("succeeded", 5, False)
    assert state["ago"] == pytest.approx(3600, abs=600)


def test_a_run_of_no_rows_and_no_end_is_shown(tmp_path: Path) -> None:
    [state] = [one.state() for one in Runs([make_run(tmp_path / "new", outcome=None)]).all()]
    assert (state["state"], state["problems"]) == ("no result", {})
    assert (state["metrics"]["rows"], state["metrics"]["columns"]) == (0, {"step": ""})


def test_what_is_damaged_in_one_run_hides_no_other_run(tmp_path: Path) -> None:
    for name in ("sound", "summary", "metrics", "trace", "config", "deleted"):
        make_run(tmp_path / name, ROWS)
    (tmp_path / "summary" / "summary.json").write_text("{")
    (tmp_path / "metrics" / "metrics.csv").write_bytes(b"\x00\xff no csv\n1\n")
    (tmp_path / "trace" / "trace.json.gz").write_bytes(b"\x1f\x8bhalf")
    (tmp_path / "config" / "config.toml").write_text("job = ")
    with entered(tmp_path) as client:
        shutil.rmtree(tmp_path / "deleted")
        found = states(client)
        assert len(found) == 6
        assert found["deleted"]["state"] == "deleted"
        assert "there is no such folder" in found["deleted"]["problems"]["run"]
        assert found["summary"]["state"] == "unreadable"
        assert "summary.json cannot be read" in found["summary"]["problems"]["run"]
        assert found["summary"]["metrics"]["rows"] == 5
        assert "is not a metrics file of a run" in found["metrics"]["problems"]["metrics"]
        assert found["metrics"]["state"] == "succeeded"
        assert found["sound"]["problems"] == {}
        number = {name: run["id"] for name, run in found.items()}
        assert (
            "is not a trace of a run" in settled(client, "/api/timeline", number["trace"])["error"]
        )
        asked = client.get("/api/settings", params={"run": number["config"]})
        assert "is not TOML" in asked.json()["error"]
        assert client.get("/api/settings", params={"run": number["sound"]}).status_code == 200


def settled(client: httpx.Client, path: str, run: int) -> Any:
    """The answer once it is no longer that the trace is being read."""
    while (answer := client.get(path, params={"run": run})).status_code == 202:
        time.sleep(0.02)
    kind = answer.headers["content-type"]
    return answer.json() if kind == "application/json" else answer.content


def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "live"
    command = (sys.executable, "-c", HOLD, path)
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == b"runs\n"
        with entered(tmp_path) as client:
            [state] = states(client).values()
            assert (state["state"], state["live"], state["iteration"]) == ("running", True, 7)
            told = client.get("/api/graph", params={"run": 0}).json()
            assert told["when"] == "now"
            full = next(one for one in told["channels"] if one["name"] == "requests")
            assert (full["depth"], full["capacity"]) == (8, 8)
            ends = {(edge["group"], edge["channel"], edge["way"]) for edge in told["edges"]}
            assert ("Rollout", "generated", "out") in ends
            assert ("the run", "requests", "out") in ends  # it waits there itself
            process.communicate()
            [state] = states(client).values()
            assert (state["state"], state["live"]) == ("no result", False)


def test_the_graph_of_a_run_that_has_ended_comes_from_its_trace(tmp_path: Path) -> None:
    make_run(tmp_path / "ended", ROWS)
    with entered(tmp_path / "ended") as client:
        told = settled(client, "/api/graph", 0)
        assert told["when"] == "mean"
        assert [one["name"] for one in told["groups"]] == ["Actor", "Reward", "Rollout", "the run"]
        ends = {(edge["group"], edge["channel"], edge["way"]) for edge in told["edges"]}
        assert ("the run", "scored", "in") in ends  # what no worker gets comes back to the run
        assert ("the run", "requests", "out") in ends
        depth = next(one["depth"] for one in told["channels"] if one["name"] == "requests")
        assert depth == pytest.approx(sum(i % 5 for i in range(29)) / 29)


def test_the_graph_says_who_waited_for_whom(tmp_path: Path) -> None:
    run = make_run(tmp_path / "waited", ROWS)
    keep_waits(run)
    with entered(run) as client:
        told = settled(client, "/api/graph", 0)
        busy = {one["name"]: one.get("busy") for one in told["groups"]}
        assert (busy["Rollout"], busy["Reward"]) == (pytest.approx(0.25), pytest.approx(0.95))
        assert told["iterations"] == [1, 4]
        assert told["bottleneck"]["role"] == "reward"
        assert "reward" in told["bottleneck"]["sentence"]
        shares = [(one["group"], one["channel"], one["share"]) for one in told["shares"]]
        assert shares == [("Rollout", "generated", 0.75), ("the run", "scored", 0.25)]
        assert told["shares"][0]["unblockers"] == ["Reward"]
        with (run / "waits.jsonl").open("ab") as file:
            file.write(b'{"iteration": "none"}\n{"iteration')
        told = settled(client, "/api/graph", 0)
        assert "line 5 is no record of waits" in told["problem"]
        assert told["channels"]


def test_of_a_long_run_the_newest_waits_are_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "long")
    keep_waits(run, iterations=3000)
    records, bottleneck = NewestWaits(run).read()
    assert records[-1].iteration == 3000
    assert bottleneck is not None
    assert bottleneck.role == "reward"
    assert 10 < len(records) < 3000


def test_only_new_cells_are_told_and_all_of_a_file_that_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    log = CsvLog(path, keep_to=None)
    table = Table(path)
    for step in range(3):
        log.write(step, {"loss": step / 2})
    table.read()
    first = table.since(["loss"], 0, 0)
    assert (first["rows"], first["columns"]) == (3, {"step": "0,1,2", "loss": "0,0.5,1"})
    log.write(3, {"loss": 1.5})
    table.read()
    more = table.since(["loss"], 3, first["generation"])
    assert (more["after"], more["columns"]) == (3, {"step": "3", "loss": "1.5"})
    log.write(4, {"loss": 2.0, "new": 1.0})  # a new column: another file
    table.read()
    again = table.since(["new"], 4, first["generation"])
    assert (again["after"], again["columns"]["new"]) == (0, ",,,,1")
    log.close()
    CsvLog(path, keep_to=1).close()  # resumed at an earlier step
    table.read()
    assert (table.rows, table.generation) == (2, again["generation"] + 1)


def test_a_row_that_is_written_just_now_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    table = Table(path)
    table.read()
    path.write_text("step,loss\n0,1\n1,")
    table.read()
    assert table.rows == 1
    path.write_text("step,loss\n0,1\n1,2.5\n")
    with path.open("a") as file:
        table.read()
        assert table.since(["loss"], 0, 1)["columns"]["loss"] in ("1,2.5",)
        file.write("2,3\n")
    table.read()
    assert table.rows == 3
    path.unlink()
    table.read()
    assert (table.rows, table.columns) == (0, [])


def test_large_integers_and_what_is_no_number_come_as_they_were_written(tmp_path: Path) -> None:
    large = 2**63 + 1
    rows = [{"tokens": large, "x": math.nan}, {"tokens": 1, "x": math.inf}, {"x": -1e308}]
    with entered(make_run(tmp_path / "odd", rows)) as client:
        told = client.get("/api/metrics", params={"run": 0, "name": ["tokens", "x"]}).json()
        assert told["columns"]["tokens"] == f"{large},1,"
        assert told["columns"]["x"] == "nan,inf,-1e+308"


def test_the_configuration_has_all_digits_and_that_of_earlier_starts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "resumed", ROWS, config=CONFIG + "seed = 9007199254740993\n")
    (run / "config.1.toml").write_text(CONFIG + 'seed = 1\ntags = ["a", 1.5]\n')
    (run / "config.2.toml").write_text("[")
    told = Runs([run]).of(0).settings()
    assert told["values"]["training.seed"] == "9007199254740993"
    assert told["earlier"][0]["values"]["training.tags"] == '["a", 1.5]'
    assert "is not TOML" in told["earlier"][1]["error"]


def test_runs_that_come_later_are_shown_and_names_are_told_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "same")
    make_run(tmp_path / "b" / "same")
    runs = Runs([tmp_path / "a", tmp_path / "b" / "same"])
    assert [run.name for run in runs.all()] == ["same", "a/same"]
    make_run(tmp_path / "a" / "later")
    runs.look_again()
    assert "later" in [run.name for run in runs.all()]


def test_a_folder_without_a_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(tmp_path)]) == 2
    assert "nor holds any" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "nothing")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_a_taken_port_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    with listener(0) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(run), "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1 is taken" in said
    assert "--port 0" in said


def test_it_listens_on_loopback_only() -> None:
    with listener(0) as made:
        assert made.getsockname()[0] == "127.0.0.1"


def test_no_runs_below_the_folder_of_runs_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no run below"):
        Runs([])
