"""Benches are found by their folder, and the checkout's own are sound."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks.harness import Bench
from benchmarks.harness.run import BENCHMARKS, all_benches, bench_named
from rlinf_async.cli import main
from rlinf_async.config import UsageError
from tests.bench.conftest import Write

EMPTY = 'from benchmarks.harness import Bench\nBENCH = Bench("one", "nothing", cases=(), bars=())\n'


def test_a_bench_is_found_by_its_name(write_bench: Write) -> None:
    assert bench_named("one", write_bench("one", EMPTY)).summary == "nothing"


def test_an_unknown_bench_is_an_error_with_the_names_there_are(write_bench: Write) -> None:
    folder = write_bench("one", EMPTY)
    with pytest.raises(UsageError, match=r"no bench 'onee' \(did you mean 'one'\?\)"):
        bench_named("onee", folder)


def test_a_file_that_defines_no_bench_is_named(write_bench: Write) -> None:
    folder = write_bench("other", EMPTY)
    with pytest.raises(UsageError, match=r"other/bench\.py: must define BENCH = Bench\(name"):
        bench_named("other", folder)


def test_an_installation_without_benches_says_where_they_are(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlinf_async.cli.checkpoints.CHECKOUT", tmp_path)
    assert main(["bench", "--list"]) == 2
    assert "source checkout" in capsys.readouterr().err


@pytest.mark.parametrize("bench", all_benches(), ids=lambda bench: bench.name)
def test_every_case_and_file_that_the_checkouts_benches_name_exists(bench: Bench) -> None:
    names = {case.name for case in bench.cases}
    assert all(set(bar.cases) <= names for bar in bench.bars)
    here = str(BENCHMARKS / bench.name)
    words = [word for case in bench.cases for word in case.command if "{here}" in word]
    files = [pathlib.Path(word.replace("{here}", here)) for word in words]
    assert [file for file in files if not file.is_file()] == []


def test_listing_names_each_bench_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [bench.name for bench in all_benches()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench"], "which bench?"),
        (["bench", "chanels"], "did you mean 'channels'?"),
        (["bench", "channels", "--case", "zmk"], "--case: no case of 'channels' has 'zmk'"),
        (["bench", "channels", "--json", "no/such/folder/x.json"], "does not exist"),
    ],
)
def test_a_wrong_bench_command_ends_with_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
