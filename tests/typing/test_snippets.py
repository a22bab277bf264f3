"""Mistakes that mypy and pyright must find, and correct code in which they must find none.

Each file in ``snippets`` is checked by both. A line that must be refused says by which error:
``# E mypy=arg-type pyright=reportArgumentType``. The files are no ``.py`` files, so that the checks
of the whole project pass over them; a new file there is a new test.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNIPPETS = sorted((Path(__file__).parent / "snippets").glob("*.snippet"))
MARK = re.compile(r"# E mypy=(?P<mypy>[\w-]+) pyright=(?P<pyright>\w+)$")
MYPY_LINE = re.compile(r"^[^:]*?(?P<file>\w+)\.py:(?P<line>\d+): error: .*\[(?P<code>[\w-]+)\]$")

Error = tuple[int, str]
"""A line and the code of the error in it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The snippets as Python files."""
    path = tmp_path_factory.mktemp("snippets")
    for snippet in SNIPPETS:
        shutil.copy(snippet, path / f"{snippet.stem}_snippet.py")
    return path


@pytest.fixture(scope="module")
def found_by_mypy(folder: Path) -> dict[str, set[Error]]:
    """What mypy finds in each file, under the project's own settings."""
    pytest.importorskip("mypy")
    run = check(
        "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--no-pretty", *files(folder)
    )
    found: dict[str, set[Error]] = {}
    for line in run.stdout.splitlines():
        if match := MYPY_LINE.match(line):
            error = int(match["line"]), match["code"]
            found.setdefault(match["file"].removesuffix("_snippet"), set()).add(error)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return found


@pytest.fixture(scope="module")
def found_by_pyright(folder: Path) -> dict[str, set[Error]]:
    """What pyright finds in each file."""
    pytest.importorskip("pyright")
    run = check("pyright", "--outputjson", "--pythonpath", sys.executable, *files(folder))
    found: dict[str, set[Error]] = {}
    for finding in json.loads(run.stdout)["generalDiagnostics"]:
        if finding["severity"] == "error":
            name = Path(finding["file"]).stem.removesuffix("_snippet")
            line = finding["range"]["start"]["line"] + 1
            found.setdefault(name, set()).add((line, finding.get("rule", "syntax")))
    return found


def files(folder: Path) -> list[str]:
    """The Python files in a folder."""
    return [str(path) for path in sorted(folder.glob("*.py"))]


def check(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a type checker in the project's root, where it finds the package."""
    return subprocess.run(
        [sys.executable, "-m", tool, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def wanted(snippet: Path, tool: str) -> set[Error]:
    """The errors that the file's own marks ask for."""
    lines = enumerate(snippet.read_text().splitlines(), start=1)
    return {(number, match[tool]) for number, line in lines if (match := MARK.search(line))}


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.stem)
def test_mypy_finds_the_marked_mistakes_and_no_others(
    snippet: Path, found_by_mypy: dict[str, set[Error]]
) -> None:
    assert found_by_mypy.get(snippet.stem, set()) == wanted(snippet, "mypy")


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.stem)
def test_pyright_finds_the_marked_mistakes_and_no_others(
    snippet: Path, found_by_pyright: dict[str, set[Error]]
) -> None:
    assert found_by_pyright.get(snippet.stem, set()) == wanted(snippet, "pyright")


def test_every_snippet_marks_at_least_one_mistake() -> None:
    assert SNIPPETS
    for snippet in SNIPPETS:
        assert wanted(snippet, "mypy"), f"{snippet.name} would pass with checkers that see nothing"
