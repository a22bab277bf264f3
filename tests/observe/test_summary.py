"""The summary has the results of a run; its last line has the files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rlinf_async.observe.files import RunFolderError
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import (
    EmbodiedSummary,
    LanguageSummary,
    Staleness,
    last_line,
    read_summary,
    write_summary,
)

SUMMARY = EmbodiedSummary(
    run="fetch_reach_ppo",
    outcome="succeeded",
    seed=0,
    iterations=41,
    env_steps=32800,
    train_seconds=21.43,
    steps_per_second=1530.6,
    success_rate=1.0,
    return_=-1.62,
    staleness=Staleness(mean=0.9, max=1, allowed=1),
    extra={"checkpoint": "checkpoints/41"},
)


def test_the_summary_is_json_under_the_documented_names(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, SUMMARY)
    written = msgspec.json.decode(path.read_bytes())
    assert written["success_rate"] == 1.0
    assert written["train_seconds"] == 21.43
    assert written["steps_per_second"] == 1530.6
    assert written["return"] == -1.62
    assert written["staleness"] == {"mean": 0.9, "max": 1, "allowed": 1}
    assert written["extra"] == {"checkpoint": "checkpoints/41"}
    assert read_summary(path, EmbodiedSummary) == SUMMARY


def test_what_was_not_measured_or_is_no_number_is_null_and_never_zero(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, msgspec.structs.replace(SUMMARY, success_rate=None, return_=float("nan")))
    written = msgspec.json.decode(path.read_bytes())
    assert written["success_rate"] is None
    assert written["return"] is None


def test_something_else_is_not_read_as_a_summary(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"run": 3}')
    with pytest.raises(RunFolderError, match=r"summary\.json is not the summary of a run"):
        read_summary(tmp_path / "summary.json", EmbodiedSummary)


def test_the_last_line_names_the_result_the_folder_and_only_what_is_there(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", config_text="") as folder:
        write_summary(folder.summary, SUMMARY)
        folder.metrics.write_text("step\n")
        (folder.checkpoints / "41").mkdir()
        assert last_line(folder, SUMMARY) == (
            "fetch_reach_ppo succeeded: success rate 1.00, return -1.62, 21.4 s of training, "
            f"32,800 steps, 1,531 steps/s -> {tmp_path / 'run'} "
            "(summary.json, metrics.csv, checkpoints/)"
        )


def test_the_last_line_of_a_run_that_failed_early_makes_nothing_up(tmp_path: Path) -> None:
    failed = EmbodiedSummary(
        run="r", outcome="failed", seed=0, iterations=0, env_steps=0, train_seconds=0.0, error="x"
    )
    with RunFolder.create(tmp_path, config_text="") as folder:
        assert last_line(folder, failed) == (
            f"r failed: 0.0 s of training, 0 steps -> {tmp_path} (nothing was written)"
        )


def test_a_run_of_a_language_model_is_summed_up_by_its_accuracy(tmp_path: Path) -> None:
    summary = LanguageSummary(
        run="grpo",
        outcome="succeeded",
        seed=0,
        iterations=30,
        train_seconds=61.25,
        samples=3840,
        samples_per_second=62.7,
        eval_accuracy_before=0.41,
        eval_accuracy=0.93,
    )
    write_summary(tmp_path / "summary.json", summary)
    assert read_summary(tmp_path / "summary.json", LanguageSummary) == summary
    assert summary.figures() == [
        "accuracy 0.93 (before: 0.41)",
        "61.2 s of training",
        "3,840 samples",
        "63 samples/s",
    ]
    shaped = msgspec.structs.replace(
        summary, eval_accuracy=None, eval_reward=-0.5, evaluation_samples=200,
        evaluation_unscored=3, outcomes={"scored": 3800, "failed": 30, "rejected": 10},
    )  # fmt: skip
    assert shaped.figures() == [
        "mean reward -0.50",
        "3 of 200 not scored",
        "61.2 s of training",
        "3,840 samples",
        "40 of them not scored",
        "63 samples/s",
    ]
