"""However often a run is killed and resumed, each step stands in the CSV once."""

from __future__ import annotations

import errno
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_async.config import registry as registry_module
from rlinf_async.observe.files import MetricsError, RunFolderError
from rlinf_async.observe.metrics import MetricsWriter, read_columns
from rlinf_async.observe.sinks.config import SINK_GROUP
from tests.observe.test_files import full_disk_after
from tests.observe.test_tensorboard import shown

WRITE_FOR_EVER = """
import itertools, sys
from rlinf_async.observe.metrics import MetricsWriter
writer = MetricsWriter(sys.argv[1], resume_at=int(sys.argv[2]), sinks=[])
for step in itertools.count(int(sys.argv[2]) + 1):
    writer.write(step, {"return": step * 0.5})
    print(step, flush=True)
"""


def steps_of(folder: Path) -> list[float]:
    return read_columns(folder / "metrics.csv")["step"]


def write_steps(folder: Path, steps: range, *, resume_at: int | None = None) -> None:
    with MetricsWriter(folder, resume_at=resume_at, sinks=[]) as writer:
        for step in steps:
            writer.write(step, {"return": float(step)})


def test_a_row_reads_back_as_it_was_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, sinks=[]) as writer:
        writer.write(0, {"env_steps": 800, "return": -1.25, "a, b": np.float32(0.5)})
    assert (tmp_path / "metrics.csv").read_text() == (
        'step,env_steps,return,"a, b"\n0,800,-1.25,0.5\n'
    )


def test_a_row_is_in_the_file_before_the_writer_is_closed(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, sinks=[]) as writer:
        writer.write(0, {"return": 1.0})
        assert steps_of(tmp_path) == [0.0]


def test_a_new_metric_becomes_the_last_column_and_earlier_rows_are_empty_there(
    tmp_path: Path,
) -> None:
    with MetricsWriter(tmp_path, sinks=[]) as writer:
        writer.write(0, {"return": 1.0})
        writer.write(1, {"eval_return": 3.0, "return": 2.0})
        writer.write(2, {"return": 2.5})
    columns = read_columns(tmp_path / "metrics.csv")
    assert list(columns) == ["step", "return", "eval_return"]
    assert columns["return"] == [1.0, 2.0, 2.5]
    assert np.isnan(columns["eval_return"]).tolist() == [True, False, True]


def test_numbers_that_are_not_finite_stay_what_they_are(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, sinks=[]) as writer:
        writer.write(0, {"loss": math.nan, "ratio": math.inf})
    columns = read_columns(tmp_path / "metrics.csv")
    assert math.isnan(columns["loss"][0])
    assert columns["ratio"] == [math.inf]


def test_rows_past_the_resume_point_are_dropped_and_counted(tmp_path: Path) -> None:
    write_steps(tmp_path, range(5))
    with MetricsWriter(tmp_path, resume_at=2, sinks=[]) as writer:
        assert writer.dropped_rows == 2
        writer.write(3, {"return": 3.0})
    assert steps_of(tmp_path) == [0, 1, 2, 3]


def test_resuming_twice_doubles_nothing(tmp_path: Path) -> None:
    write_steps(tmp_path, range(4))
    for _ in range(2):
        write_steps(tmp_path, range(2, 4), resume_at=1)
    assert steps_of(tmp_path) == [0, 1, 2, 3]


def test_a_fresh_writer_keeps_nothing(tmp_path: Path) -> None:
    write_steps(tmp_path, range(4))
    write_steps(tmp_path, range(1))
    assert steps_of(tmp_path) == [0]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    write_steps(tmp_path, range(3))
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-2])
    assert steps_of(tmp_path) == [0, 1]
    with MetricsWriter(tmp_path, resume_at=9, sinks=[]) as writer:
        assert writer.dropped_rows == 1
    assert steps_of(tmp_path) == [0, 1]


def test_a_writer_killed_in_the_middle_loses_no_row_it_had_written(tmp_path: Path) -> None:
    seen = -1
    for _ in range(2):
        command = [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path), str(seen)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(50):
                seen = int(process.stdout.readline())
            process.kill()
    with MetricsWriter(tmp_path, resume_at=seen, sinks=[]):
        assert steps_of(tmp_path) == list(range(seen + 1))


@pytest.mark.parametrize("name", ["return", "a column that is new"])
@pytest.mark.parametrize("free", [0, 3])
def test_rows_wait_for_a_full_disk_which_is_said_once_and_no_row_is_torn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: int,
    name: str,
) -> None:
    with MetricsWriter(tmp_path, sinks=["tensorboard"]) as writer:
        writer.write(0, {"return": 1.0})
        with monkeypatch.context() as patch:
            patch.setattr("os.write", full_disk_after(free))
            for step in (1, 2, 3):
                writer.write(step, {"return": 1.5, name: 2.5})
        assert steps_of(tmp_path) == [0]
        said = [record.message for record in caplog.records]
        assert "metrics.csv: No space left on device; free some space there" in said[0]
        assert "metrics sink 'tensorboard' failed at step 1: cannot write " in said[1]
        assert len(said) == 2
        writer.write(4, {"return": 3.5})
        assert steps_of(tmp_path) == [0, 1, 2, 3, 4]
    columns = read_columns(tmp_path / "metrics.csv")
    assert columns[name][1:4] == [2.5] * 3
    assert shown(tmp_path) == [(0, 1.0), (4, 3.5)]


def test_rows_that_still_wait_at_the_end_are_an_error_that_names_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = MetricsWriter(tmp_path, sinks=[])
    monkeypatch.setattr("os.write", full_disk_after(0))
    writer.write(0, {"return": 1.0})
    with pytest.raises(RunFolderError, match=r"metrics\.csv: No space left on device"):
        writer.close()
    writer.close()


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def _move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def _replace(folder: Path) -> None:
    """As a checkpoint, which makes its folder, and another run in it."""
    _remove(folder)
    folder.mkdir()
    (folder / "metrics.csv").touch()


def _remove_file(folder: Path) -> None:
    (folder / "metrics.csv").unlink()


@pytest.mark.parametrize("change", [_remove, _move, _replace, _remove_file])
@pytest.mark.parametrize("last", [True, False])
def test_a_run_does_not_end_as_if_its_metrics_were_where_they_are_not(
    tmp_path: Path, change: Callable[[Path], None], last: bool
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    writer = MetricsWriter(folder, sinks=[])
    writer.write(0, {"return": 1.0})
    change(folder)
    message = r"metrics\.csv was removed, moved or replaced while the run went on"
    with pytest.raises(RunFolderError, match=message):
        writer.close() if last else writer.write(1, {"return": 1.0})


@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.EACCES])
def test_a_disk_that_does_not_answer_for_a_moment_ends_no_run(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, **_: Any) -> os.stat_result:
        raise OSError(code, os.strerror(code), str(path))

    with MetricsWriter(tmp_path, sinks=[]) as writer:
        writer.write(0, {"return": 1.0})
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", fails)
            writer.write(1, {"return": 2.0})
    assert (tmp_path / "metrics.csv").read_text() == "step,return\n0,1\n1,2\n"


def test_a_file_that_is_no_metrics_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("name,price\napple,1\n")
    with pytest.raises(RunFolderError, match="it is not a metrics file of a run"):
        MetricsWriter(tmp_path)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": "high"}, "metric 'loss' is 'high', which is not a number"),
        ({"loss": None}, "metric 'loss' is None, which is not a number"),
        ({"loss": np.zeros(2)}, "metric 'loss' is .* which is not a number"),
        ({"step": 1.0}, "a metric may not be named 'step'"),
        ({"a\nb": 1.0}, "cannot name a metric"),
    ],
)
def test_a_bad_metric_is_named(tmp_path: Path, metrics: dict[str, float], message: str) -> None:
    with (
        MetricsWriter(tmp_path, sinks=[]) as writer,
        pytest.raises(MetricsError, match=message),
    ):
        writer.write(0, metrics)


class ListSink:
    """A sink that keeps its rows, and breaks at step 2."""

    made: list[tuple[Path, int | None]]
    rows: list[tuple[int, dict[str, float]]]

    def __init__(self, folder: Path, resume_at: int | None) -> None:
        type(self).made = [(folder, resume_at)]
        type(self).rows = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            raise ConnectionError("the server is gone")
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.rows.append((-1, {}))


@pytest.fixture
def list_sink(monkeypatch: pytest.MonkeyPatch) -> type[ListSink]:
    """`ListSink`, installed as the entry point ``list``."""
    target = f"{__name__}:ListSink"
    entry = EntryPoint(name="list", value=target, group=SINK_GROUP)
    monkeypatch.setattr(registry_module, "entry_points", lambda *, group: [entry])
    return ListSink


def test_a_sink_of_another_package_gets_every_row(
    tmp_path: Path, list_sink: type[ListSink]
) -> None:
    with MetricsWriter(tmp_path, resume_at=None, sinks=["list"]) as writer:
        writer.write(0, {"return": 1.0})
    assert list_sink.made == [(tmp_path, None)]
    assert list_sink.rows == [(0, {"return": 1.0}), (-1, {})]


def test_a_sink_that_breaks_is_named_with_its_cause_once_and_ends_no_run(
    tmp_path: Path, list_sink: type[ListSink], caplog: pytest.LogCaptureFixture
) -> None:
    with MetricsWriter(tmp_path, sinks=["list"]) as writer:
        for step in (1, 2, 2, 3):
            writer.write(step, {"return": 1.0})
    broken = "metrics sink 'list' failed at step 2: ConnectionError: the server is gone"
    assert [record.message for record in caplog.records] == [
        f"{broken}; the run goes on without it"
    ]
    assert steps_of(tmp_path) == [1, 2, 2, 3]
    assert [step for step, _ in list_sink.rows] == [1, 3, -1]


@pytest.mark.usefixtures("list_sink")
def test_an_unknown_sink_is_an_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    message = r"no metrics sink is called 'nowhere' \(known: 'list', 'mlflow', "
    with pytest.raises(MetricsError, match=message):
        MetricsWriter(tmp_path, sinks=["nowhere"])
    assert not (tmp_path / "metrics.csv").exists()
