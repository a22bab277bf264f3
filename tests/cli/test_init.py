"""``rlinf-async init``: each project tests itself, trains, and is clean, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf_async.cli import main
from rlinf_async.cli.init import NEEDS
from rlinf_async.observe.summary import EmbodiedSummary, LanguageSummary, read_summary
from tests.architecture.sources import ROOT

TEMPLATES = ROOT / "rlinf_async" / "templates"
MODULES = {"agent": "transformers", "embodied": "gymnasium", "language": "transformers"}
"""what a project needs beyond the package"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the project, which sees nothing of this checkout but the package."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def project(tmp_path: Path) -> Callable[[str], Path]:
    """A project of a kind, as the command writes it."""

    def write(kind: str) -> Path:
        pytest.importorskip(MODULES.get(kind, "msgspec"))
        folder = tmp_path / f"my {kind}"
        assert main(["init", kind, str(folder)]) == 0
        return folder

    return write


def test_every_kind_has_a_template() -> None:
    assert {one.parent.name for one in TEMPLATES.glob("*/Makefile")} == set(NEEDS)


@pytest.mark.parametrize("kind", NEEDS)
def test_a_project_tests_itself_and_is_clean(kind: str, project: Callable[[str], Path]) -> None:
    folder = project(kind)
    names = {one.name for one in folder.iterdir()}
    assert {"Makefile", "README.md"} < names
    assert ("train.toml" in names) == (kind != "worker")
    texts = [(folder / name).read_text(encoding="utf-8") for name in names]
    assert not [text for text in texts if "@NAME@" in text or "@PYTHON@" in text]
    tested = run(folder, "make", "test")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    clean = run(folder, sys.executable, "-m", "ruff", "check", "--isolated", ".")
    assert clean.returncode == 0, clean.stdout


def test_the_policy_of_the_embodied_project_is_trained_and_shown(
    project: Callable[[str], Path],
) -> None:
    folder = project("embodied")
    text = (folder / "train.toml").read_text(encoding="utf-8")
    assert text.count("total_steps = 61_440") == 1
    (folder / "train.toml").write_text(text.replace("61_440", "2_560"), encoding="utf-8")
    done = run(folder, "make", "train", "RUN=runs/short")
    assert "fell short" in done.stdout, done.stderr
    summary = read_summary(folder / "runs" / "short" / "summary.json", EmbodiedSummary)
    assert (summary.iterations, summary.env_steps) == (2, 2560)
    assert summary.success_rate is not None
    shown = run(folder, "make", "show")
    assert shown.returncode == 0, shown.stderr
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("kind", "samples"), [("language", 256), ("agent", 128)])
def test_the_models_of_the_language_projects_are_trained(
    kind: str, samples: int, project: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, with settings given on the command line."""
    folder = project(kind)
    monkeypatch.chdir(folder)
    assert run(folder, "make", "data").returncode == 0
    short = ("--training.iterations", "1", "--warm_start.steps", "10", "--evaluation.samples", "10")
    words = ["train", "train.toml", "--out", "run", "--cluster.backend", "local", *short]
    assert main(words) == 1  # one iteration does not reach the target
    summary = read_summary(folder / "run" / "summary.json", LanguageSummary)
    assert (summary.outcome, summary.iterations, summary.samples) == ("fell short", 1, samples)
    assert summary.outcomes == {"scored": samples}


def test_the_workers_learn_and_draw_how(project: Callable[[str], Path]) -> None:
    folder = project("worker")
    done = run(folder, "make", "train", "ITERATIONS=20")
    assert (done.returncode, done.stderr) == (0, "")
    last = done.stdout.splitlines()[-1]
    assert int(last.partition("iteration: ")[2].partition("%")[0]) > 90
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("embodeid", "new"), "no project is called 'embodeid' (did you mean 'embodied'?)"),
        (("robot", "new"), "there are agent, embodied, language, worker"),
        (("worker", "full"), "full is not empty (a.txt): name a new folder"),
        (("worker", "full/a.txt"), "full/a.txt is a file: name a new folder"),
        (("worker", "full/a.txt/b"), "the project cannot be written to full/a.txt/b"),
        (("worker",), "Missing argument 'FOLDER'"),
    ],
)
def test_what_cannot_be_written_is_named(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("mine")
    assert main(["init", *words]) == 2
    assert said in capsys.readouterr().err
    assert [one.name for one in tmp_path.rglob("*")] == ["full", "a.txt"]
    assert (tmp_path / "full" / "a.txt").read_text() == "mine"


def test_a_folder_that_is_there_and_empty_is_taken(tmp_path: Path) -> None:
    (tmp_path / "Pick & place!").mkdir()
    assert main(["init", "embodied", str(tmp_path / "Pick & place!")]) == 0
    text = (tmp_path / "Pick & place!" / "train.toml").read_text(encoding="utf-8")
    assert 'name = "Pick-place"' in text
