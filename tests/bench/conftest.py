"""A folder of small benches whose cases are one-line programs."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from benchmarks.harness import Bench, Case, ratio
from benchmarks.harness.peers import PeerStore


def printing(name: str, program: str) -> Case:
    """A case that runs one line of Python."""
    return Case(name, ("{python}", "-c", program), timeout=30)


def versus(ours: Case, theirs: Case, at_least: float = 2.0) -> Bench:
    """A bench of two cases and one bar on their ``rate``."""
    bar = ratio("rate", metric="rate", ours="ours", theirs="theirs", at_least=at_least)
    return Bench("small", "a small bench", cases=(ours, theirs), bars=(bar,), repetitions=3)


@pytest.fixture
def store(tmp_path: pathlib.Path) -> PeerStore:
    return PeerStore(tmp_path / "peers")


Write = Callable[[str, str], pathlib.Path]


@pytest.fixture
def write_bench(tmp_path: pathlib.Path) -> Write:
    """Writes ``NAME/bench.py`` and gives the folder of benches."""

    def write(name: str, text: str) -> pathlib.Path:
        folder = tmp_path / "benchmarks"
        (folder / name).mkdir(parents=True)
        (folder / name / "bench.py").write_text(text, encoding="utf-8")
        return folder

    return write
