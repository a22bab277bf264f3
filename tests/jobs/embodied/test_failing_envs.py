"""Environments that hang, exit, crash: no command goes along with them, and none is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.embodied.kit import Job

MAKE = "tests.workers.env.failing:Failing"
PROCESS = ("--cluster.backend", "process", "--cluster.rollout_workers", "auto")
CALLED = "Failing"


def failing(where: str, fault: str, **more: Any) -> tuple[object, ...]:
    """Flags for an environment that fails so, in runs whose workers are processes."""
    kwargs = {"where": where, "fault": fault} | more
    table = ", ".join(f'{name} = "{value}"' for name, value in kwargs.items())
    limits = ("--env.make_seconds", 10, "--env.reset_seconds", 2, "--env.step_seconds", 2)
    return (
        *("--env.id", CALLED, "--env.entry_point", MAKE, "--env.kwargs", f"{{{table}}}"),
        *(*limits, *PROCESS),
    )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("exits", "the process ended by itself: exit code 7; under way was env Failing, while it"),
        ("crashes", "killed by SIGSEGV; under way was env Failing, while it was made"),
        ("leaves", "raised SystemExit: 3"),
        ("interrupts", "raised KeyboardInterrupt: "),
    ],
)
def test_check_outlives_an_environment_that_cannot_be_made(job: Job, fault: str, said: str) -> None:
    ended = job.command("check", job.file, *failing("make", fault))
    assert ended.code == 2, ended.err
    assert "env.entry_point: " in ended.err
    assert said in ended.err


def test_check_names_an_environment_that_hangs_within_the_limit(job: Job) -> None:
    flags = failing("make", "hangs")
    ended = job.command("check", job.file, *flags, "--env.make_seconds", 1)
    assert ended.code == 2
    assert "env Failing, while it was made, has not returned for env.make_seconds = 1" in ended.err


def test_check_makes_an_environment_and_neither_resets_nor_steps_it(
    job: Job, tmp_path: Path
) -> None:
    log = tmp_path / "calls"
    ended = job.command("check", job.file, *failing("", "", log=log))
    assert ended.code == 0, ended.err
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["make", "close"]
    assert "rollout_workers = 0 or 1, as measured when the run begins" in ended.out


def always_right(env: object, seed: int) -> Any:
    """A scripted policy."""
    return lambda observation: 1


@pytest.mark.parametrize(
    ("where", "fault", "said"),
    [
        ("step", "raises", "at step 3 of its life and 3 of its episode, raised ArithmeticError"),
        ("step", "exits", "exit code 7; under way was env Failing, seed 5, in step() at step 3 of"),
        (
            "reset",
            "hangs",
            "Failing, seed 5, in reset() at step 0 of its life and 0 of its episod",
        ),
    ],
)
def test_demonstrations_name_the_environment_with_its_seed_and_step(
    job: Job, tmp_path: Path, where: str, fault: str, said: str
) -> None:
    table = f'id = "{CALLED}"\nentry_point = "{MAKE}"\nreset_seconds = 1.0\n'
    table += f'kwargs = {{where = "{where}", fault = "{fault}"}}\n'
    text = job.file.read_text().replace('id = "CartPole-v1"\n', table)
    job.file.write_text(text.replace('backend = "local"\n', ""))
    policy = ("--policy", "tests.jobs.embodied.test_failing_envs:always_right")
    ended = job.command(
        *("demonstrations", job.file, *policy, "--out", tmp_path / "demonstrations", "--seed", 5)
    )
    assert ended.code == 2
    assert said in ended.err
