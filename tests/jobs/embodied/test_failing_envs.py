"""Environments that hang, exit, crash: no command goes along with them, and none is left behind."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlinf_async.messages.embodied import TrainReport
from rlinf_async.observe import status
from rlinf_async.observe.progress import RunConsole, picture_of
from rlinf_async.observe.status import Status
from rlinf_async.runtime.jobs.embodied.run import EmbodiedProgress
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


def test_check_outlives_the_file_of_a_scripted_policy(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('noise')\nos._exit(7)\n")
    flags = ("--demonstrations.policy", f"{script}:expert", "--cluster.backend", "process")
    ended = job.command("check", job.file, *flags)
    assert ended.code == 2
    assert "demonstrations.policy: " in ended.err
    assert "the process ended by itself: exit code 7\nit printed last:\nnoise" in ended.err


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


def written(job: Job, where: str, fault: str, **more: str) -> None:
    """Let the file of the job be of an environment that fails so."""
    kwargs = {"where": where, "fault": fault} | more
    table = ", ".join(f'{name} = "{value}"' for name, value in kwargs.items())
    settings = (
        f'id = "{CALLED}"\nentry_point = "{MAKE}"\nkwargs = {{{table}}}\n'
        "probe = false\nstep_seconds = 2.0\nreset_seconds = 2.0\n"
    )
    text = job.file.read_text().replace('id = "CartPole-v1"\n', settings)
    text = text.replace('backend = "local"\n', "").replace("total_steps = 384", "total_steps = 64")
    job.file.write_text(text.replace("rollout_workers = 1", "rollout_workers = 0"))


@pytest.mark.parametrize(("simulator", "fault"), [("single", "hangs"), ("pool", "crashes")])
def test_a_worker_whose_environment_crashes_or_hangs_is_started_again(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulator: str, fault: str
) -> None:
    states = written_states(monkeypatch)
    written(job, "step", fault, once=str(tmp_path / "failed"), log=str(tmp_path / "calls"))
    summary = job.succeed("--env.simulator", simulator)
    assert summary.restarts == {"Env[0]": 1}
    job.check_records(1, 64)
    assert not left(tmp_path / "calls")
    # Counted once: in the metrics, in the last status, in the summary, in the rate of successes.
    assert [row["failed_episodes"] for row in job.iterations] == ["1"]
    assert summary.failed_episodes == 1
    shown = states[-1].shown
    assert dict(shown.figures)["failed episodes"] == "1 of 100 (env.max_failures)"
    [failure] = [one.failure for one in shown.workers if one.name == "Env[0]"]
    assert "Failing[" in failure
    assert ", in step() at step 3 of its life and 3 of its episode" in failure
    said = io.StringIO()
    RunConsole(file=said, width=300).print(picture_of(shown, 300, whole=True))
    assert f"Env[0] failed: {failure}" in said.getvalue()
    [row] = job.iterations
    episodes = int(row["episodes"])
    assert float(row["success_rate"]) == pytest.approx(episodes / (episodes + 1))
    assert summary.success_rate == 1.0
    assert summary.evaluation_failed == 0


def written_states(monkeypatch: pytest.MonkeyPatch) -> list[Status]:
    """What `rlinf-async status` would have shown, as it is written: the file goes with the run."""
    states, write = list[Status](), status.write_status

    def writing(path: Path, state: Status) -> None:
        states.append(state)
        write(path, state)

    monkeypatch.setattr("rlinf_async.runtime.jobs.view.write_status", writing)
    return states


def test_more_failures_than_a_run_may_have_end_it_with_the_last_and_the_setting(
    job: Job, tmp_path: Path
) -> None:
    written(job, "step", "exits", once=str(tmp_path / "failed"), log=str(tmp_path / "calls"))
    ended = job.train("--env.max_failures", 0)
    assert ended.code == 1
    error = ended.err.partition("error: ")[2]
    assert error.startswith("1 episodes have ended with the process of their environment")
    assert "env.max_failures = 0; the last: the process ended by itself: exit code 7" in error
    assert "in step() at step 3 of its life and 3 of its episode" in error
    assert job.summary.outcome == "failed"
    assert job.summary.failed_episodes == 1
    assert not left(tmp_path / "calls")


def test_an_environment_that_always_fails_ends_the_run_with_its_name(
    job: Job, tmp_path: Path
) -> None:
    written(job, "step", "exits", log=str(tmp_path / "calls"))
    ended = job.train("--cluster.max_restarts", 1)
    assert ended.code == 1
    error = ended.err.partition("error: ")[2]
    assert error.startswith("Env[0] failed in its process")
    assert "exit code 7; under way was env Failing[" in error
    assert "in step() at step 3 of its life and 3 of its episode" in error
    assert "Env[0] was restarted 1 times; the policy allows 1 within 60 s" in error
    assert not left(tmp_path / "calls")


def test_an_evaluation_and_a_video_outlive_their_environment(job: Job, tmp_path: Path) -> None:
    written(job, "render", "crashes", log=str(tmp_path / "calls"))
    summary = job.succeed("--evaluation.video_episodes", 1)
    assert "killed by SIGSEGV; under way was env Failing" in str(summary.extra["video"])
    config = job.out / "config.toml"
    config.write_text(config.read_text().replace('"render"', '"step"'))
    ended = job.command("evaluate", job.out)
    assert ended.code == 1
    assert "killed by SIGSEGV; under way was env Failing[" in ended.err
    assert "in step() at step 3 of its life and 3 of its episode" in ended.err
    assert not left(tmp_path / "calls")


def left(log: Path) -> list[str]:
    """Processes that have called an environment and are still there."""
    processes = {line.split()[1] for line in log.read_text().splitlines()}
    return [one for one in processes if Path("/proc", one).exists()]


def test_failed_episodes_are_counted_on_from_a_checkpoint_and_are_none_of_the_successes() -> None:
    report = TrainReport(
        iteration=0,
        version=1,
        metrics={},
        env_steps=8,
        lag_mean=0.0,
        lag_max=0,
        duplicates=0,
        episode_return=[1.0, 2.0, 3.0],
        episode_length=[2, 3, 3],
        episode_success=[True, None, True],
    )
    progress = EmbodiedProgress()
    progress.take(report, 1.0, window=100, failed=2)
    again = msgspec.json.decode(msgspec.json.encode(progress), type=EmbodiedProgress)
    assert (again.episodes, again.failed_episodes) == (3, 2)
    assert again.success_rate == 2 / 5
    assert again.returns == [1.0, 2.0, 3.0]
    silent = EmbodiedProgress()
    silent.take(msgspec.structs.replace(report, episode_success=[None] * 3), 1.0, 100, failed=2)
    assert (silent.failed_episodes, silent.success_rate) == (2, None)
