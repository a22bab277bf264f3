"""How a failed run ends: one clear message, and the exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_async.cli import COMMANDS
from tests.cli.conftest import CommandLine
from tests.runtime.scripts import running


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
def test_a_failed_run_prints_its_cause_and_nothing_else(
    command_line: CommandLine, end: str, code: int, message: str
) -> None:
    found, out, err = command_line.train("--end", end)
    assert (found, out, err.lstrip()) == (code, "", message)


def test_an_error_that_is_not_ours_is_named_with_its_type(command_line: CommandLine) -> None:
    code, _, err = command_line.train("--end", "disk")
    assert code == 1
    assert err.startswith("error: OSError: [Errno 28] No space left on device: 'runs/a/metrics")
    assert "--traceback" in err


def test_a_setting_that_is_wrong_on_a_worker_s_host_takes_no_traceback(
    command_line: CommandLine,
) -> None:
    code, _, err = command_line.train("--end", "setting")
    assert code == 1
    assert err == (
        "error: Env[1] failed in setup (process 7 on beta): ConfigError: env.entry_point: there is "
        "no such file\n(--traceback shows where this was raised)\n"
    )


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
    said = command_line.run("walk")[2]
    assert f"There are: {', '.join(sorted(COMMANDS))}." in said


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


SCRIPT = """
import asyncio, pathlib, sys, time
import rlinf_async as ra
from rlinf_async.cli import COMMANDS, main
from tests.cli.fake import FakeJob

class Waits(FakeJob):
    def run(self, config, out, resume):
        BODY

if __name__ == "__main__":
    file = pathlib.Path(__file__).with_suffix(".toml")
    file.write_text('job = "fake"')
    sys.exit(main(["train", str(file)], Waits().find))
"""
IN_A_COROUTINE = """
        async def wait():
            print("running", flush=True)
            await asyncio.Event().wait()
        ra.run(wait())"""
IN_A_FUNCTION = """
        print("running", flush=True)
        while True:
            time.sleep(1)"""


@pytest.mark.parametrize("body", [IN_A_COROUTINE, IN_A_FUNCTION], ids=["coroutine", "function"])
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGTERM, 143, "terminated\n"), (signal.SIGINT, 130, "interrupted\n")],
)
def test_a_signal_ends_a_command_with_its_exit_code(
    body: str, number: signal.Signals, code: int, message: str
) -> None:
    with running(SCRIPT.replace("BODY", body)) as script:
        script.wait_for("running")
        script.process.send_signal(number)
        found, _, err = script.end()
    assert (found, err.lstrip()) == (code, message)


def test_sigusr1_does_not_end_a_command() -> None:
    with running(SCRIPT.replace("BODY", IN_A_FUNCTION)) as script:
        script.wait_for("running")
        script.process.send_signal(signal.SIGUSR1)
        script.process.send_signal(signal.SIGTERM)
        code, _, _ = script.end()
    assert code == 143


def test_the_package_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_async", "train"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "which configuration?" in done.stderr


def test_demonstrations_of_a_job_without_an_environment_say_so(
    command_line: CommandLine, tmp_path: Path
) -> None:
    options = ("--policy", "mine.py:make", "--out", tmp_path / "out")
    code, _, err = command_line.run("demonstrations", command_line.file, *options)
    assert code == 2
    assert err.startswith(f"error: {command_line.file} is for 'fake', which has no environment")
