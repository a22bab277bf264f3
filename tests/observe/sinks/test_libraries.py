"""wandb, mlflow and trackio themselves: what they have of a run that failed and was resumed."""

from __future__ import annotations

import importlib.util
import math
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.sinks.child import State
from rlinf_async.observe.sinks.config import ObserveConfig
from rlinf_async.observe.sinks.mlflow import _taken
from rlinf_async.observe.sinks.opened import OpenSinks
from rlinf_async.observe.sinks.part import Outcome, SinkRun
from rlinf_async.observe.sinks.wandb import WandbConfig
from tests.observe.sinks import stores

LIBRARIES = [name for name in ("wandb", "mlflow", "trackio") if importlib.util.find_spec(name)]


def start(
    folder: Path, steps: range, outcome: Outcome, *, resume_at: int | None, **config: Any
) -> None:
    """One start of a run that writes rows of these steps and ends."""
    observe = ObserveConfig(sinks=tuple(LIBRARIES), wandb=WandbConfig(mode="offline"))
    run = SinkRun(folder=str(folder), name="run-7", config=config)
    sinks = OpenSinks(observe, run)
    with MetricsWriter(folder, resume_at=resume_at, sinks=sinks) as writer:
        for step in steps:
            writer.write(step, {"loss/kl": math.nan if step == 2 else step / 4, "reward": 1.0})
        for name in LIBRARIES:  # they may take long to open
            while last_step(folder / "sinks" / f"{name}.json") != steps[-1]:
                time.sleep(0.05)
    sinks.close(outcome)


def last_step(state: Path) -> int | None:
    """The last step that was handed over."""
    return msgspec.json.decode(state.read_bytes(), type=State).step if state.exists() else None


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sinks' files of a run that failed at step 4, and went on from step 3 to 6."""
    folder, config = tmp_path_factory.mktemp("runs") / "run-7", {"actor": {"lr": 0.5}}
    folder.mkdir()
    start(folder, range(1, 5), "failed", resume_at=None, **config)
    start(folder, range(4, 7), "finished", resume_at=3, **config)
    return folder / "sinks"


@pytest.mark.parametrize("library", ["wandb", "mlflow", "trackio"])
def test_a_resumed_run_is_one_run_in_which_each_step_stands_once(files: Path, library: str) -> None:
    if library not in LIBRARIES:
        pytest.skip(f"{library} is not installed")
    stored: stores.Stored = getattr(stores, library)(files)
    assert stored.runs == 1
    assert [step for step, _ in stored.rows] == [1, 2, 3, 4, 5, 6]
    values = dict(stored.rows)
    assert math.isnan(values.pop(2))
    assert values == {step: step / 4 for step in (1, 3, 4, 5, 6)}
    assert stored.config == "0.5"
    assert stored.outcome == ("" if library == "trackio" else "finished")


@pytest.mark.parametrize("library", ["wandb", "mlflow", "trackio"])
def test_what_a_library_prints_goes_to_its_log(files: Path, library: str) -> None:
    if library in LIBRARIES:
        assert (files / f"{library}.log").exists()


def test_a_metric_has_a_name_that_mlflow_takes() -> None:
    names = ["loss/kl", "a b", "50%", "../x", "", "ü", "x" * 300]
    assert [_taken(one) for one in names] == ["loss/kl", "a b", "50_", "x", "_", "_", "x" * 250]
