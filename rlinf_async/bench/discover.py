"""Finding benches: every ``benchmarks/NAME/bench.py`` of the checkout that is installed."""

from __future__ import annotations

import importlib.util
import pathlib

from rlinf_async.bench.model import Bench
from rlinf_async.config.errors import UsageError, nearest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def all_benches(folder: pathlib.Path = BENCHMARKS) -> list[Bench]:
    """Every bench, by name."""
    return [bench_named(name, folder) for name in _names(folder)]


def bench_named(name: str, folder: pathlib.Path = BENCHMARKS) -> Bench:
    """The bench of this name; `UsageError` lists those there are."""
    names = _names(folder)
    if name not in names:
        raise UsageError(
            f"there is no bench {name!r}{nearest(name, names)}; there are: {', '.join(names)}"
        )
    return _load(folder / name / "bench.py", name)


def folder_of(bench: Bench, folder: pathlib.Path = BENCHMARKS) -> pathlib.Path:
    """The folder that a bench's scripts lie in."""
    return folder / bench.name


def _names(folder: pathlib.Path) -> list[str]:
    if not folder.is_dir():
        raise UsageError(
            f"no benches in {folder}: they come with a source checkout, installed by "
            "'pip install -e .'"
        )
    return sorted(found.parent.name for found in folder.glob("*/bench.py"))


def _load(file: pathlib.Path, name: str) -> Bench:
    spec = importlib.util.spec_from_file_location(f"benchmarks.{name}.bench", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    bench = getattr(module, "BENCH", None)
    if not isinstance(bench, Bench) or bench.name != name:
        raise UsageError(f"{file}: must define BENCH = Bench(name={name!r}, ...)")
    return bench
