"""A bench from its cases to its last line, its exit code and its JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import pytest

from benchmarks.harness import Bench, Case, PeerSoftware
from benchmarks.harness.cores import cores_there
from benchmarks.harness.peers import PeerStore
from benchmarks.harness.report import run_bench
from tests.bench.conftest import printing, versus

FAST = "print('warming up'); print('{{\"rate\": 30}}')"
SLOW = "print('{{\"rate\": 10}}')"
PEER = PeerSoftware("nobody", requirements=(("./there-is-no-such-package",),))


@dataclasses.dataclass
class Runner:
    """Runs a bench and keeps its exit code, what it printed, and its JSON."""

    folder: pathlib.Path
    store: PeerStore
    capture: pytest.CaptureFixture[str]

    def __call__(self, bench: Bench, with_peers: bool = False) -> tuple[int, list[str], Any]:
        file = self.folder / "result.json"
        code = run_bench(
            bench,
            with_peers=with_peers,
            json_file=file,
            benchmarks=self.folder,
            store=self.store,
        )
        printed = self.capture.readouterr().out.splitlines()
        return code, printed, json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture
def run(
    tmp_path: pathlib.Path,
    store: PeerStore,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Runner:
    monkeypatch.setenv("COLUMNS", "160")
    return Runner(tmp_path, store, capsys)


def test_a_bar_that_is_reached_is_held(run: Runner) -> None:
    code, printed, report = run(versus(printing("ours", FAST), printing("theirs", SLOW)))
    assert (code, printed[-1]) == (0, "1 bar held, 0 fell short")
    assert any("rate" in line and "3x" in line and ">= 2x" in line for line in printed)
    [bar] = report["bars"]
    assert (bar["outcome"], bar["value"], bar["target"]) == ("held", 3.0, 2.0)


def test_a_bar_that_is_missed_makes_the_exit_code_1(run: Runner) -> None:
    code, printed, _ = run(versus(printing("ours", SLOW), printing("theirs", FAST)))
    assert (code, printed[-1]) == (1, "0 bars held, 1 fell short")


def test_one_repetition_of_large_numbers_fits_a_narrow_terminal(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ours = printing("ours, of which the name is a long one", "print('{{\"rate\": 3624892384}}')")
    bench = Bench("small", "a small bench", cases=(ours,), bars=(), repetitions=1)
    _, printed, _ = run(bench)
    assert any("long one" in line and "rate" in line and "3.625 G" in line for line in printed)
    assert not any("lowest" in line for line in printed)


def test_the_json_holds_every_sample_and_the_machine(run: Runner) -> None:
    _, _, report = run(versus(printing("ours", FAST), printing("theirs", SLOW)))
    assert report["cases"]["ours"]["samples"] == [{"rate": 30.0}] * 3
    assert report["cases"]["ours"]["medians"] == {"rate": 30.0}
    assert report["machine"]["cores"] >= 1
    assert len(report["machine"]["load_average"]) == 3
    assert "rlinf-async" in report["machine"]["versions"]


def test_cases_alternate_and_nobody_is_always_first(run: Runner, tmp_path: pathlib.Path) -> None:
    log = tmp_path / "order"
    note = f"open({str(log)!r}, 'a').write('%s{{repetition}} '); print('{{{{\"rate\": 1}}}}')"
    ours, theirs = (printing(name, note % name) for name in ("ours", "theirs"))
    run(versus(ours, theirs))
    assert log.read_text().split() == ["ours0", "theirs0", "theirs1", "ours1", "ours2", "theirs2"]


def test_a_case_that_fails_makes_its_bar_fall_short_with_its_last_words(run: Runner) -> None:
    broken = printing("theirs", "raise SystemExit('no such joint')")
    code, printed, report = run(versus(printing("ours", FAST), broken))
    assert (code, printed[-1]) == (1, "0 bars held, 1 fell short")
    assert "no such joint" in report["bars"][0]["reason"]
    assert report["cases"]["theirs"]["samples"] == []


def test_a_case_that_prints_no_numbers_makes_its_bar_fall_short(run: Runner) -> None:
    _, _, report = run(versus(printing("ours", FAST), printing("theirs", "print('done')")))
    assert "left no measurement" in report["bars"][0]["reason"]


def test_a_metric_that_nobody_printed_is_named(run: Runner) -> None:
    other = printing("theirs", "print('{{\"speed\": 3}}')")
    _, _, report = run(versus(printing("ours", FAST), other))
    assert "theirs printed no 'rate', only speed" in report["bars"][0]["reason"]


def test_a_peer_that_was_not_asked_for_leaves_its_bar_unmeasured(run: Runner) -> None:
    theirs = dataclasses.replace(printing("theirs", SLOW), peer=PEER)
    code, printed, report = run(versus(printing("ours", FAST), theirs))
    assert (code, printed[-2:]) == (0, ["1 not measured", "0 bars held, 0 fell short"])
    assert report["bars"][0]["outcome"] == "not measured"


def test_a_peer_that_cannot_be_installed_is_said_to_be_missing(run: Runner) -> None:
    theirs = dataclasses.replace(printing("theirs", SLOW), peer=PEER)
    code, printed, report = run(versus(printing("ours", FAST), theirs), with_peers=True)
    assert (code, printed[-1]) == (1, "0 bars held, 1 fell short")
    assert "peer missing: nobody could not be installed" in report["bars"][0]["reason"]
    assert report["cases"]["theirs"]["samples"] == []


def test_a_module_that_our_interpreter_lacks_is_said_to_be_missing(run: Runner) -> None:
    theirs = dataclasses.replace(printing("theirs", SLOW), requires=("no_such_module_at_all",))
    _, _, report = run(versus(printing("ours", FAST), theirs))
    assert "peer missing: pip install no_such_module_at_all" in report["bars"][0]["reason"]


def test_a_peers_virtualenv_is_made_once_and_runs_its_case(run: Runner) -> None:
    program = "import sys; print('{{\"rate\": %d}}' % (sys.prefix != sys.base_prefix))"
    theirs = dataclasses.replace(
        printing("theirs", program), peer=PeerSoftware("bare", requirements=())
    )
    bench = versus(printing("ours", FAST), theirs)
    _, _, report = run(bench, with_peers=True)
    assert report["cases"]["theirs"]["medians"] == {"rate": 1.0}
    marker = next(run.store.root.glob("bare-*/complete"))
    made = marker.stat().st_mtime_ns
    run(bench, with_peers=True)
    assert marker.stat().st_mtime_ns == made


def test_a_case_is_pinned_and_told_how_many_threads_to_use(run: Runner) -> None:
    program = (
        "import os, json; print(json.dumps(dict("
        "rate=int(os.environ['OMP_NUM_THREADS']), cores=len(os.sched_getaffinity(0)))))"
    )
    case = Case("ours", ("{python}", "-c", program), cores=1, threads=2)
    _, _, report = run(versus(case, printing("theirs", SLOW)))
    assert report["cases"]["ours"]["medians"] == {"rate": 2.0, "cores": 1.0}


def test_a_case_on_several_cores_says_how_many_were_there(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared machine the second core comes and goes: before a run, and after it."""
    there = iter([2.0, 1.0])
    monkeypatch.setattr("benchmarks.harness.run.cores_there", lambda _: next(there))
    both = dataclasses.replace(printing("both", FAST), cores=2)
    cases = (both, printing("one", FAST))
    _, printed, report = run(Bench("small", "a small bench", cases=cases, bars=(), repetitions=1))
    assert report["cases"]["both"]["samples"] == [{"rate": 30.0, "cores": 1.5}]
    assert report["cases"]["one"]["samples"] == [{"rate": 30.0}]
    assert any("cores" in line and "1.5" in line for line in printed)


@pytest.mark.parametrize("cores", [1, 2])
def test_cores_are_counted_by_processes_of_their_own(cores: int) -> None:
    assert 0.0 < (cores_there(cores) or 0.0) < math.inf


def test_cores_that_cannot_be_counted_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.cores.sys.executable", "/there/is/no/python")
    assert cores_there(2) is None
    monkeypatch.setattr("benchmarks.harness.cores.sys.executable", "/bin/true")
    assert cores_there(2) is None
