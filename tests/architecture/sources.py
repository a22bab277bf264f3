"""The project's modules and what they import, read from their text."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTSIDE = ("channels", "workers")
"""Packages whose code lies in the root folder; symlinks in ``rlinf_async/`` lead there."""


@dataclass(frozen=True)
class Import:
    """One import in one module."""

    where: str
    """The importing module's dotted name."""
    package: str
    """The part of the project that it belongs to: ``channels``, ``runtime``, ..."""
    what: str
    """The imported module's dotted name."""
    lazy: bool
    """Inside a function, or for type checkers only: not run when the module is imported."""

    @property
    def target(self) -> str:
        """The part of the project that is imported, or the top name of something else."""
        parts = self.what.split(".")
        if parts[0] != "rlinf_async":
            return parts[0]
        return parts[1] if len(parts) > 1 else "rlinf_async"


def folders() -> list[Path]:
    """Every folder that holds a part of the project; `loose` are the parts without one."""
    inside = [
        path
        for path in sorted((ROOT / "rlinf_async").iterdir())
        if path.is_dir() and path.name not in OUTSIDE and (path / "__init__.py").is_file()
    ]
    return [*(ROOT / name for name in OUTSIDE), *inside]


def loose() -> list[Path]:
    """Every part of the project that is a module by itself."""
    inside = sorted((ROOT / "rlinf_async").glob("*.py"))
    return [path for path in inside if path.name != "__init__.py"]


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {f"rlinf_async.{path.stem}": path for path in loose()}
    for folder in folders():
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder.parent).with_suffix("")
            name = ".".join(("rlinf_async", *inner.parts)).removesuffix(".__init__")
            found[name] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    """Every import of every module."""
    return tuple(
        Import(name, name.split(".")[1], what, lazy)
        for name, path in modules().items()
        for what, lazy in _imports_of(ast.parse(path.read_text()).body, lazy=False)
    )


@cache
def import_graph() -> dict[str, frozenset[str]]:
    """Which modules of the project each module names in its imports, anywhere in its text.

    ``from package import name`` names the submodule, where there is one of that name, or else the
    package's ``__init__``, which is a module like any other: one that offers the names of its
    submodules imports them. That importing ``a.b.c`` also runs ``a/__init__`` and ``a.b/__init__``
    does not count: Python does it for every submodule.
    """
    paths = {**modules(), "rlinf_async": ROOT / "rlinf_async" / "__init__.py"}
    graph: dict[str, frozenset[str]] = {}
    for name, path in paths.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.update(_named_by(node, paths))
        graph[name] = frozenset(found & set(paths) - {name})
    return graph


def _named_by(node: ast.ImportFrom, paths: dict[str, Path]) -> Iterator[str]:
    if node.level:
        raise ValueError(f"a relative import in line {node.lineno}: name the whole module")
    for alias in node.names:
        submodule = f"{node.module}.{alias.name}"
        yield submodule if submodule in paths else str(node.module)


def _imports_of(nodes: Iterable[ast.AST], lazy: bool) -> Iterator[tuple[str, bool]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _imports_from(node, lazy)
        else:
            inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports_of(
                ast.iter_child_nodes(node), lazy or inner or _is_for_type_checkers(node)
            )


def _imports_from(node: ast.ImportFrom, lazy: bool) -> Iterator[tuple[str, bool]]:
    module = node.module or ""
    if module == "rlinf_async":  # ``from rlinf_async import backends`` imports a part
        yield from ((f"{module}.{alias.name}", lazy) for alias in node.names)
    else:
        yield module, lazy


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
