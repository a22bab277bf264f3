"""The job of docs/jobs.md, as the page has it: run, resumed, and refused."""

from __future__ import annotations

import csv
import json
import pathlib

import pytest

from rlinf_async.cli import main
from tests.docs.pages import ROOT, blocks


@pytest.fixture
def page(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with the files that the page shows; the current one."""
    shown = blocks(ROOT / "docs" / "jobs.md")
    found = {one.language: one.text for one in reversed(shown)}  # the first of each language
    (tmp_path / "pass_at_k.py").write_text(found["python"])
    (tmp_path / "pass_at_k.toml").write_text(found["toml"])
    records = [{"prompt": f"{number}+{number}=", "answer": 2 * number} for number in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*arguments: str) -> int:
    return main(["train", "pass_at_k.toml", "--out", "run", *arguments])


def test_the_job_of_the_page_runs_and_is_resumed(page: pathlib.Path) -> None:
    assert main(["check", "pass_at_k.toml"]) == 0
    assert train() == 0
    summary = json.loads((page / "run" / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    assert summary["tasks"] == 3 * 4
    assert 0.0 < summary["pass_at_k"] <= 1.0
    assert train("--resume", "--sampling.iterations", "5", "--cluster.backend", "local") == 0
    summary = json.loads((page / "run" / "summary.json").read_text())
    assert (summary["iterations"], summary["tasks"]) == (5, 5 * 4)
    with (page / "run" / "metrics.csv").open(newline="") as file:
        assert [row["iteration"] for row in csv.DictReader(file)] == ["0", "1", "2", "3", "4"]
    for name in ("timeline.png", "config.1.toml", "checkpoints/version-000005"):
        assert (page / "run" / name).exists()


def test_the_job_of_the_page_is_not_resumed_under_another_configuration(
    page: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = ("--cluster.backend", "local", "--sampling.iterations", "1")
    assert train(*local) == 0
    assert train(*local, "--resume", "--sampling.k", "9") == 2
    assert "sampling.k (8 in the run, 9 now)" in capsys.readouterr().err


def test_a_job_that_cannot_be_imported_is_wrong_input(
    page: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (page / "pass_at_k.py").unlink()
    assert train() == 2
    assert "'pass_at_k.py:PassAtK': 'pass_at_k.py' cannot be imported" in capsys.readouterr().err
