"""What goes wrong while a run runs: one clear error with its cause, or it goes on."""

from __future__ import annotations

import pathlib
import re
import shutil
import tempfile

import numpy as np
import pytest

from rlinf_async.backends.base import PolicyAnswer
from rlinf_async.backends.policies.serving import PolicyServer
from rlinf_async.channels import Receiver, Sender
from rlinf_async.messages.embodied import (
    Actions,
    Collect,
    Floats,
    Intervention,
    Observations,
    Proposal,
    Trajectory,
)
from rlinf_async.runtime.jobs.embodied import collectors
from rlinf_async.workers.env import EnvReport, EnvWorker
from tests.jobs.embodied.kit import Job
from tests.jobs.kit import Ended
from tests.workers.actor.toy import trajectory

WALK = ("--env.id", "Walk", "--env.entry_point", "tests.jobs.embodied.envs:Walk", "--env.kwargs")
PROCESS = ("--cluster.backend", "process")
Form = tuple[object, ...]
FORMS: list[Form] = [(), ("--cluster.rollout_workers", 0)]
"""apart, together"""


def failed(ended: Ended) -> str:
    """The one error of a run that failed."""
    assert ended.code == 1, ended.err
    assert ended.err.count("error: ") == 1
    return ended.err.partition("error: ")[2].splitlines()[0]


def test_an_env_that_raises_in_the_middle_is_named_with_its_step_and_seed(job: Job) -> None:
    error = failed(job.train(*WALK, "{fails_at = 100}", "--training.total_steps", 512))
    assert error.startswith("Env[0] failed in collect")
    assert "env Walk[" in error
    assert "at step 100 of its life and 10 of its episode, raised ArithmeticError" in error
    assert "the simulator exploded" in error
    assert job.summary.outcome == "failed"
    assert job.summary.iterations == 6  # of 16 steps each, the seventh has step 100
    assert "the simulator exploded" in str(job.summary.error)


def test_an_env_that_shows_nan_is_named(job: Job) -> None:
    error = failed(job.train(*WALK, "{shows = nan}", "--env.probe", "false"))
    assert "env Walk[0]" in error
    assert "NaN or infinite" in error


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("env", ["Pendulum-v1", "CartPole-v1"])
def test_training_that_diverges_says_so_and_what_to_do(job: Job, env: str) -> None:
    error = failed(job.train("--actor.fsdp.optimizer.lr", 1e30, "--env.id", env))
    # Which env is ready first decides what is learnt from, and so whether the trainer's gradients
    # or the policy's actions are the first to go.
    trainer = "a gradient norm that is not finite" in error and "Lower the learning rate" in error
    policy = "are NaN or infinite; look at the observations first, then at the learning" in error
    assert trainer or policy, error


@pytest.mark.parametrize("form", FORMS)
def test_a_policy_that_returns_nan_is_named_with_its_version(
    job: Job, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    def nan(policy: PolicyServer, observation: Floats) -> PolicyAnswer:
        rows = len(observation)
        zeros = np.zeros(rows, np.float32)
        return PolicyAnswer(np.zeros(rows, np.int64), zeros, np.full(rows, np.nan, np.float32))

    monkeypatch.setattr(PolicyServer, "act", nan)
    error = failed(job.train(*form))
    assert "the policy, weights version 0, returned 'value' with 2 of 2 values NaN" in error


def test_an_env_whose_reset_takes_longer_than_the_deadlock_limit_is_waited_for(job: Job) -> None:
    one = ("--env.envs", 1, "--env.stages", 1, "--training.total_steps", 32)
    job.succeed(*WALK, "{reset_seconds = 2.5}", *one, "--cluster.deadlock_after", 1)
    job.check_records(2, 16)


def test_an_env_that_cannot_be_filmed_costs_the_video_and_nothing_else(job: Job) -> None:
    summary = job.succeed(*WALK, "{}", "--evaluation.video_episodes", 1)
    assert summary.outcome == "finished"
    assert "render_mode" in str(summary.extra["video"])
    job.check_records(6, 64)


class Repeating(EnvWorker):
    """Sends a trajectory again at the end, like a worker that died before its call returned."""

    async def collect(
        self,
        tickets: Receiver[Collect],
        observations: Sender[Observations],
        actions: Receiver[Actions],
        trajectories: Sender[Trajectory],
        proposals: Sender[Proposal] | None = None,
        interventions: Receiver[Intervention] | None = None,
    ) -> EnvReport:
        report = await super().collect(tickets, observations, actions, trajectories)
        await trajectories.put(trajectory(0), key=0)
        return report


def test_a_trajectory_that_comes_again_after_the_last_iteration_does_no_harm(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectors, "EnvWorker", Repeating)
    job.succeed()
    job.check_records(6, 64)


def test_checkpoints_on_a_full_disk_are_the_error_that_is_shown(
    job: Job, full_disk: pathlib.Path
) -> None:
    job.keep_checkpoints_on(full_disk)
    ended = job.train()
    error = failed(ended)
    assert re.match(r"Actor\[0\] failed in (begin_checkpoint|checkpoint_written)", error)
    assert f"cannot write the checkpoint {job.out}/checkpoints/version-000002" in error
    assert "No space left on device; free some space there" in error
    assert "Traceback" not in ended.err
    assert (job.out / "trace.json.gz").exists()
    assert job.summary.outcome == "failed"


def test_a_disk_that_fills_up_beside_training_is_named_by_what_needs_it(
    job: Job, full_disk: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What only shows the run does not end it: its last checkpoint does, or its metrics."""
    job.out = full_disk / "run"
    ended = job.train("--training.checkpoint_every", 0, "--training.total_steps", 9600)
    error = failed(ended)
    assert re.search(rf"cannot write (the checkpoint )?{job.out}/", error)
    assert "No space left on device; free some space there" in error
    assert caplog.text.count("metrics sink 'tensorboard' failed") == 1
    written = {"trace": job.out / "trace.json.gz", "summary": job.out / "summary.json"}
    for what, file in written.items():  # one may just have fitted
        assert file.exists() is not (f"the {what} was not written" in ended.err), what


def test_a_socket_path_that_is_too_long_is_an_error_that_shows_it(
    job: Job, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    ended = job.train(*PROCESS)
    assert ended.code == 2  # found before any worker started
    assert "choose a shorter folder" in ended.err
    assert str(folder) in ended.err


def test_a_temporary_folder_that_is_not_there_is_an_error_that_shows_it(
    job: Job, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert str(tmp_path / "gone") in failed(job.train(*PROCESS))


def test_a_damaged_checkpoint_is_not_resumed(job: Job) -> None:
    job.succeed()
    file = job.out / "checkpoints" / job.note["checkpoint"] / "rank_0_of_1.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    error = failed(job.train("--resume", "--training.total_steps", 512))
    assert error.startswith("Actor[0] failed in setup")
    assert f"{file} is damaged" in error


@pytest.mark.parametrize("what", ["note", "folder"])
def test_a_checkpoint_that_cannot_be_found_is_wrong_input(job: Job, what: str) -> None:
    job.succeed()
    checkpoints = job.out / "checkpoints"
    if what == "note":
        (checkpoints / "latest.json").write_text("{")
    else:
        shutil.rmtree(checkpoints / job.note["checkpoint"])
    ended = job.train("--resume")
    assert ended.code == 2
    assert str(checkpoints / "latest.json") in ended.err


def test_a_run_is_not_resumed_under_another_configuration(job: Job) -> None:
    job.succeed()
    ended = job.train(
        *("--resume", "--actor.fsdp.policy.hidden_sizes", "[32, 32]", "--env.stages", 1),
        *("--training.total_steps", 512),
    )
    assert ended.code == 2
    assert "actor.fsdp.policy.hidden_sizes ((64, 64) in the run, (32, 32) now)" in ended.err
    assert "env.stages (2 in the run, 1 now)" in ended.err
    assert "A resumed run may change: name, model.path, training.total_steps" in ended.err
    assert [path.name for path in job.out.glob("config*")] == ["config.toml"]
    job.succeed("--resume")


def test_a_run_whose_configuration_is_gone_is_not_resumed(job: Job) -> None:
    job.succeed()
    (job.out / "config.toml").unlink()
    ended = job.train("--resume", "--training.total_steps", 512)
    assert ended.code == 2
    assert "holds a run, but not its config.toml" in ended.err


def test_a_start_that_was_killed_before_its_configuration_was_written_begins_again(
    job: Job,
) -> None:
    job.out.mkdir()
    (job.out / "run.json").write_text('{"made_by": "rlinf_async", "starts": [1.0]}')
    assert job.succeed("--resume", "--training.total_steps", 64).env_steps == 64


def test_a_resumed_run_that_is_refused_gets_its_configuration_back(job: Job) -> None:
    job.succeed()
    latest = job.out / "checkpoints" / "latest.json"
    kept, configuration = latest.read_bytes(), (job.out / "config.toml").read_text()
    latest.write_text("{")
    assert job.train("--resume", "--training.total_steps", 512).code == 2
    assert [path.name for path in job.out.glob("config*")] == ["config.toml"]
    assert (job.out / "config.toml").read_text() == configuration
    latest.write_bytes(kept)
    assert job.succeed("--resume", "--training.total_steps", 512).iterations == 8
    assert (job.out / "config.1.toml").read_text() == configuration
