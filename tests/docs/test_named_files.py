"""Files that docstrings and pages name are in the repository, or in a package that is named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import PAGES, ROOT

SOURCES: Final = ("rlinf_async", "channels", "workers", "tests", "examples", "benchmarks", "tools")
NAMED = re.compile(r"(?<![\w/.{}*-])(?:[\w-]+/)*[\w-]+\.(?:md|py)\b(?![\w(*])")
OF_THE_READER = re.compile(r"(file|FILE|script|mine|rewards|my_\w+|(benchmarks/)?NAME/bench)\.py")
"""what stands for a file of the reader's own"""
IN_EXAMPLES: Final = {
    *("bad.py", "dead.py", "pass_at_k.py", "test_agent.py", "test_tally.py", "near.py", "nera.py"),
    *("digits.py", "reach.py"),
}
"""files that pages have their reader write"""


@cache
def names() -> frozenset[str]:
    """Every path in the repository, and its endings."""
    skipped = {".git", ".venv", "node_modules", "src", "build", "dist"}
    found = set[str]()
    for path in ROOT.rglob("*.*"):
        parts = path.relative_to(ROOT).parts
        if path.suffix in (".py", ".md") and not skipped & set(parts):
            found |= {"/".join(parts[at:]) for at in range(len(parts))}
    return frozenset(found)


def is_there(name: str, where: Path) -> bool:
    if OF_THE_READER.fullmatch(name) or name in names() or (where.parent / name).exists():
        return True
    package, _, rest = name.partition("/")
    spec = find_spec(package) if rest and package.isidentifier() else None
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return any((Path(one) / rest).is_file() for one in folders)


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a module, and the texts behind its fields."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def missing(text: str, where: Path) -> list[str]:
    return [one for one in NAMED.findall(text) if not is_there(one, where)]


def test_docstrings_name_files_that_are_there() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in SOURCES
        for path in sorted((ROOT / folder).rglob("*.py"))
        for text in docstrings(path)
        for name in missing(text, path)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_that_are_there(page: Path) -> None:
    wrong = set(missing(page.read_text(encoding="utf-8"), page)) - IN_EXAMPLES
    assert not wrong
