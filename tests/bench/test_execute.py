"""One case, run once: what it sees, and that nothing of it is left."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys

import pytest

from benchmarks.harness import Case, CommandOutput
from benchmarks.harness.run import SKIPPED, CaseFailed, CaseSkipped, pinned, run_case
from tests.bench.conftest import printing
from tests.runtime.scripts import process_runs


def run(case: Case, repetition: int = 0) -> dict[str, float]:
    return run_case(
        case, python=sys.executable, here=pathlib.Path("/somewhere"), repetition=repetition
    )


def test_a_case_is_told_its_repetition() -> None:
    case = Case("seeded", ("{python}", "-c", "import sys; print(sys.argv[1])", "{repetition}"))
    seeded = dataclasses.replace(case, read=lambda outcome: {"seed": float(outcome.stdout)})
    assert run(seeded, repetition=2) == {"seed": 2.0}


def test_a_case_may_leave_its_measurement_in_a_file() -> None:
    def read(outcome: CommandOutput) -> dict[str, float]:
        return {"size": float((outcome.out / "size").read_text(encoding="utf-8"))}

    program = "import sys, pathlib; pathlib.Path(sys.argv[1], 'size').write_text('4')"
    assert run(Case("file", ("{python}", "-c", program, "{out}"), read=read)) == {"size": 4.0}


def test_paths_into_our_own_environment_are_not_handed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    program = "import os; print('{{\"paths\": %d}}' % ('PYTHONPATH' in os.environ))"
    assert run(printing("clean", program)) == {"paths": 0.0}


def test_temporary_files_are_gone_after_the_run(tmp_path: pathlib.Path) -> None:
    program = (
        "import tempfile; made = tempfile.mkdtemp(); "
        f"open({str(tmp_path / 'made')!r}, 'w').write(made); print('{{{{\"made\": 1}}}}')"
    )
    run(printing("littering", program))
    assert not pathlib.Path((tmp_path / "made").read_text(encoding="utf-8")).exists()


@pytest.mark.parametrize("own_session", [False, True])
def test_a_command_that_hangs_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, own_session: bool
) -> None:
    monkeypatch.setattr("benchmarks.harness.run._GRACE", 1.0)
    file = tmp_path / "pid"
    # Ignores what asks it to stop, and with this much memory it is not gone in an instant.
    child = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); held = b'x' * (200 << 20)"
    program = (
        "import os, signal, subprocess, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        f"child = subprocess.Popen([sys.executable, '-c', {child + '; signal.pause()'!r}], "
        f"start_new_session={own_session}); "
        f"open({str(file) + '.part'!r}, 'w').write(str(child.pid)); "
        f"os.rename({str(file) + '.part'!r}, {str(file)!r}); child.wait()"
    )
    for limit in (1.0, 4.0, 16.0):  # seconds; a slow machine may need more to come to its child
        with pytest.raises(CaseFailed, match=f"not done after {limit:.0f} s"):
            run(dataclasses.replace(printing("stuck", program), timeout=limit))
        if file.exists():
            break
    assert not process_runs(int(file.read_text()))


def test_a_command_that_cannot_run_on_this_machine_says_why() -> None:
    with pytest.raises(CaseSkipped, match=r"^no network here$"):
        run(printing("far", f"import sys; print('no network here'); sys.exit({SKIPPED})"))


def test_a_command_that_cannot_be_started_is_named() -> None:
    with pytest.raises(CaseFailed, match="cannot start /no/such/program: No such file"):
        run(Case("absent", ("/no/such/program",)))


def test_pinning_ends_with_its_block() -> None:
    before = os.sched_getaffinity(0)
    with pinned(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before
