"""No pickle is read from a socket: nothing in the wire can even name one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rlinf_async.channels.wire

SOURCES = sorted(Path(rlinf_async.channels.wire.__file__).parent.rglob("*.py"))
UNSAFE = {
    "pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing", "joblib"
}  # fmt: skip
UNSAFE_CALLS = {"eval", "exec", "loads", "load", "__import__", "import_module", "compile"}


def imported(tree: ast.AST) -> set[str]:
    """The packages that are imported anywhere in this file, also by `import_module("package")`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (module := literal_import(node)):
            names.add(module.partition(".")[0])
        elif isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def literal_import(call: ast.Call) -> str | None:
    """The module of `importlib.import_module("module")`; None where the name is computed."""
    if ast.unparse(call.func) != "importlib.import_module" or len(call.args) != 1:
        return None
    (name,) = call.args
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def called(tree: ast.AST) -> set[str]:
    """The names of all functions that are called, but for imports of a module that is named."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    functions = [call.func for call in calls if literal_import(call) is None]
    names = {one.id for one in functions if isinstance(one, ast.Name)}
    return names | {one.attr for one in functions if isinstance(one, ast.Attribute)}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_wire_names_nothing_that_could_run_what_it_reads(source: Path) -> None:
    tree = ast.parse(source.read_text())
    assert not imported(tree) & UNSAFE
    assert not called(tree) & UNSAFE_CALLS


def test_the_check_covers_the_decoder() -> None:
    assert {"codec", "arrays", "frames", "connection"} <= {path.stem for path in SOURCES}


def test_a_module_that_is_imported_by_a_computed_name_is_seen() -> None:
    computed = ast.parse("import importlib\nimportlib.import_module(name_from_the_wire)")
    assert called(computed) & UNSAFE_CALLS
    assert imported(ast.parse("importlib.import_module('pickle')")) & UNSAFE
