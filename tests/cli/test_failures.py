"""How a failed run ends: one clear message, and the exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.conftest import CommandLine


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("worker", 1, "error: env[1] (rank 1 of 2) raised ValueError in step: no such joint\n"),
        ("build", 2, "error: channel 'numbers': nobody puts anything into it\n"),
        ("group", 1, "error: env[0] died\n"),
        ("interrupt", 130, "interrupted\n"),
        ("interrupted group", 130, "interrupted\n"),
        ("terminated", 143, "terminated\n"),
    ],
)
def test_a_failed_run_says_its_cause_and_nothing_else(
    command_line: CommandLine, end: str, code: int, message: str
) -> None:
    found, out, err = command_line.train("--end", end)
    assert (found, out, err.lstrip()) == (code, "", message)


def test_an_error_that_is_not_ours_is_named_with_its_type(command_line: CommandLine) -> None:
    code, _, err = command_line.train("--end", "disk")
    assert code == 1
    assert err.startswith("error: OSError: [Errno 28] No space left on device: 'runs/a/metrics")
    assert "--traceback" in err


def test_several_errors_are_listed(command_line: CommandLine) -> None:
    code, _, err = command_line.train("--end", "many")
    assert code == 1
    assert "2 things failed:\n- env[0] died\n- RuntimeError: odd\n" in err


def test_the_traceback_is_shown_when_asked_for(command_line: CommandLine) -> None:
    code, _, err = command_line.train("--end", "worker", "--traceback")
    assert code == 1
    assert err.startswith("Traceback (most recent call last)")


def test_an_unknown_command_is_wrong_input(command_line: CommandLine) -> None:
    code, _, err = command_line.run("trian")
    assert code == 2
    assert "No such command 'trian'. Did you mean 'train'?" in err
    assert "There are: bench, check, export, reshard, train." in command_line.run("walk")[2]


@pytest.mark.parametrize(("option", "said"), [("--version", "rlinf-async"), ("--help", "Usage:")])
def test_help_and_version_are_no_failure(command_line: CommandLine, option: str, said: str) -> None:
    code, out, _ = command_line.run(option)
    assert code == 0
    assert said in out


def test_the_command_line_starts_without_anything_heavy() -> None:
    heavy = {"torch", "numpy", "matplotlib", "rich", "gymnasium", "tensorboard"}
    script = f"import rlinf_async.cli, sys; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n"
