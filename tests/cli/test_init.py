"""``rlinf-async init``: what it writes, and what it refuses.

That each project passes its own tests and trains is in ``tests/docs/test_tutorials.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf_async.cli import main
from rlinf_async.cli.init import NEEDS
from tests.architecture.sources import ROOT

TEMPLATES = ROOT / "rlinf_async" / "templates"


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
        folder = tmp_path / f"my {kind}"
        assert main(["init", kind, str(folder)]) == 0
        return folder

    return write


def test_every_kind_has_a_template() -> None:
    assert {one.parent.name for one in TEMPLATES.glob("*/Makefile")} == set(NEEDS)


@pytest.mark.parametrize("kind", NEEDS)
def test_a_project_is_clean_and_has_no_marks_of_its_template(
    kind: str, project: Callable[[str], Path]
) -> None:
    folder = project(kind)
    names = {one.name for one in folder.iterdir()}
    assert {"Makefile", "README.md"} < names
    assert ("train.toml" in names) == (kind != "worker")
    texts = [(folder / name).read_text(encoding="utf-8") for name in names]
    assert not [text for text in texts if "@NAME@" in text or "@PYTHON@" in text]
    clean = run(folder, sys.executable, "-m", "ruff", "check", "--isolated", ".")
    assert clean.returncode == 0, clean.stdout


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
