"""Runs that learn from demonstrations alone: what they leave, what is killed in them, what is
refused."""

from __future__ import annotations

import csv
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlinf_async.messages.embodied import TrainReport
from rlinf_async.observe.summary import EmbodiedSummary
from rlinf_async.policy import Policy
from rlinf_async.runtime.jobs.embodied_offline.run import OfflineRun
from tests.jobs import killing
from tests.jobs import kit as jobs
from tests.jobs.killing import nothing_left_behind
from tests.jobs.processes import Driver

SMALL = f"""\
job = "embodied_offline"
name = "small"

[env]
id = "Pendulum-v1"
envs = 2
stages = 1
actions = "rescale"

[demonstrations]
policy = "{__name__}:swinging"
episodes = 2

[training]
total_steps = 32
steps_per_iteration = 8
checkpoint_every = 2

[replay]
batch_size = 16

[actor.fsdp.policy]
hidden_sizes = [8]

[evaluation]
episodes = 2
video_episodes = 0

[cluster]
backend = "local"
rollout_workers = 0
"""
PROCESS = ("--cluster.backend", "process")
LEARNT = ("critic_loss", "value_loss", "policy_loss", "advantage", "weight", "value", "grad_norm")


def swinging(env: Any, seed: int) -> Callable[[Any], Any]:
    """A scripted policy for Pendulum, and no good one."""
    return lambda observation: np.clip(-observation[2:], -2.0, 2.0)


def chooser(env: Any, seed: int) -> Callable[[Any], int]:
    """One for CartPole: it pushes to where the pole falls."""
    return lambda observation: int(observation[2] > 0)


class Job(jobs.Job[EmbodiedSummary]):
    """One configuration file and one run folder."""

    def learnt(self, *columns: str) -> list[dict[str, str]]:
        """What the rows of iterations say of what was learnt."""
        return [{name: row[name] for name in columns or LEARNT} for row in self.iterations]

    def check_books(self, iterations: int) -> None:
        """Every gradient step was counted once, and no step of an environment was taken."""
        summary, rows = self.summary, self.iterations
        assert (summary.iterations, summary.env_steps) == (iterations, 0)
        assert summary.evaluation_episodes == 2
        assert summary.extra["gradient steps"] == 8 * iterations
        assert [int(row["iteration"]) for row in rows] == [*range(iterations)]
        assert [int(row["step"]) for row in rows] == [8 * n for n in range(1, iterations + 1)]
        assert {row["env_steps"] for row in rows} == {"0"}
        with (self.out / "metrics.csv").open(newline="") as file:
            last = [*csv.DictReader(file)][-1]
        assert last["step"] == str(8 * iterations + 1)
        assert last["eval_return"]


@pytest.fixture
def job(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Job:
    return Job(tmp_path / "small.toml", SMALL, capsys, EmbodiedSummary)


def beside(job: Job, name: str, capsys: pytest.CaptureFixture[str]) -> Job:
    """The same job with another run folder."""
    other = Job(job.file, SMALL, capsys, EmbodiedSummary)
    other.out = job.out.with_name(name)
    return other


def test_a_run_that_was_killed_learns_what_one_learns_that_was_not(
    job: Job, temporary: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def booked() -> int:
        path = job.out / "metrics.csv"
        return path.read_text().count("\n") - 1 if path.exists() else 0

    arguments = ("train", job.file, "--out", job.out, "--training.total_steps", 10**6)
    driver = Driver(temporary, *arguments)
    try:
        driver.until(lambda: booked() >= 5, "five iterations")
        driver.kill()
        assert driver.wait() == -9
    finally:
        driver.end()
    iterations = booked() + 3
    longer = ("--training.total_steps", 8 * iterations)
    job.succeed("--resume", *longer)
    job.check_books(iterations)
    whole = beside(job, "whole", capsys)
    whole.succeed(*longer, "--demonstrations.policy", "", *given(job.out / "demonstrations"))
    whole.check_books(iterations)
    assert job.learnt() == whole.learnt()


def given(folder: pathlib.Path) -> tuple[object, ...]:
    return ("--replay.demonstrations", folder)


def test_workers_that_are_killed_change_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ("--replay.storage", "memory")
    killer, written = killing.Killer(monkeypatch), OfflineRun._write_row
    killer.victims = {1: "Replay[0]", 2: "Env[0]"}

    def writing(run: OfflineRun, report: TrainReport, *rest: Any) -> None:
        written(run, report, *rest)
        killer._kill(killer.victims.pop(report.iteration, None))

    monkeypatch.setattr(OfflineRun, "_write_row", writing)
    with nothing_left_behind():
        job.succeed(*PROCESS, *kept)
    assert not killer.victims
    job.check_books(4)
    calm = beside(job, "calm", capsys)
    calm.succeed(*kept)
    assert job.learnt() == calm.learnt()


def test_two_ranks_learn_what_one_does_and_one_goes_on(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.succeed(*PROCESS, "--cluster.actors", 2, "--training.total_steps", 16)
    job.succeed("--resume")
    job.check_books(4)
    alone = beside(job, "alone", capsys)
    alone.succeed()
    for ours, theirs in zip(job.learnt(), alone.learnt(), strict=True):
        for name, value in theirs.items():
            assert float(ours[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("algorithm", ["iql", "awac"])
def test_choices_are_learnt_and_the_policy_leaves(job: Job, algorithm: str) -> None:
    job.succeed(
        *("--env.id", "CartPole-v1", "--env.actions", "clip", "--replay.n_step", 3),
        *("--demonstrations.policy", f"{__name__}:chooser", "--actor.offline.algorithm", algorithm),
    )
    job.check_books(4)
    assert ("value_loss" in job.iterations[0]) is (algorithm == "iql")
    out = job.out.with_name("policy")
    assert job.command("export", job.out, out).code == 0
    assert Policy.load(out).act(np.zeros(4, np.float32)) in (0, 1)
    ended = job.command("evaluate", job.out, "--episodes", 1)
    assert ended.code == 0, ended.err


def test_images_are_learnt_from_on_disk_and_begun_with(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = (
        *("--env.entry_point", "examples/reach_env.py:ReachTargets", "--env.id", ""),
        *("--env.kwargs", "{pixels_only = true, size = 12}"),
        *("--demonstrations.policy", "examples/reach_env.py:expert"),
        *("--actor.fsdp.policy.channels", "[4]"),
    )
    job.succeed(*pixels)
    job.check_books(4)
    out = job.out.with_name("policy.ts")
    ended = job.command("export", job.out, out, "--to", "torchscript")
    assert ended.code == 0, ended.err
    again = beside(job, "again", capsys)
    compressed = ("--replay.images", "compressed", "--training.total_steps", 8)
    again.succeed(*pixels, "--model.path", job.out, *compressed)
    assert str(again.summary.extra["began"]).startswith("with ")
    assert any((again.out / "replay/demonstrations").glob("images-*.bin"))


def test_a_data_set_of_lerobot_with_rewards_is_learnt_from(job: Job) -> None:
    recorded, data = job.out.with_name("shown"), job.out.with_name("data")
    script = ("--policy", f"{__name__}:swinging", "--episodes", 2, "--out", recorded)
    assert job.command("demonstrations", job.file, *script).code == 0
    assert job.command("export", recorded, data, "--to", "lerobot", "--fps", 20).code == 0
    from_data = ("--demonstrations.policy", "", *given(data))
    job.succeed(*from_data)
    job.check_books(4)
    stored = np.fromfile(job.out / "replay/demonstrations/reward.bin", np.float32)
    rewards = [np.load(one)["next.reward"] for one in sorted(recorded.glob("*.npz"))]
    # Both were cut by the time limit: what followed their last step is not known.
    cut = np.concatenate([one[:-1] for one in rewards])
    np.testing.assert_array_equal(stored[: len(cut)], cut)
    info = json.loads((data / "meta/info.json").read_text())

    def refused(said: str, *without: str) -> None:
        features = {name: one for name, one in info["features"].items() if name not in without}
        (data / "meta/info.json").write_text(json.dumps(info | {"features": features}))
        ended = job.command("check", job.file, *from_data)
        assert ended.code == 2
        [line] = ended.err.splitlines()
        assert said in line

    refused("have no rewards, which learning from transitions needs: its features", "next.reward")
    refused("has no actions: meta/info.json lists no feature 'action'", "action")


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("demonstrations.policy", "", "replay.demonstrations: there is nothing to learn from"),
        ("replay.demonstrations", "folder", "would record others: leave one of the two out"),
        ("training.max_staleness", 1, "max_staleness is 1, but nothing is collected while"),
        ("training.return_window", 5, "return_window is 5, but nothing is collected while"),
        ("training.keep_best.metric", "success_rate", "is of episodes, and no iteration plays one"),
        ("training.keep_best.metric", "entropy", "no iteration writes a column 'entropy'"),
        ("env.actions", "clip", "env.actions: 'clip', but the policy's actions lie in [-1, 1]"),
        ("env.action_chunk", 2, "env.action_chunk: 2 was given; learning from transitions is of"),
        ("evaluation.before", "true", "evaluation.before: true, but this job evaluates after"),
        ("cluster.actors", 2, "cluster.backend: several actors need a process each"),
        ("cluster.actors", 3, "replay.batch_size: 16 transitions cannot be divided among cluster"),
        ("actor.fsdp.critic_warmup_steps", 5, "all networks learn from the first step on: leave"),
        ("actor.offline.algorithm", "cql", "actor.offline.algorithm"),
        ("replay.capacity", 100, "replay.capacity"),
        ("replay.images", "compressed", "images: 'compressed', but Pendulum-v1 shows no images"),
    ],
)
def test_what_cannot_be_is_named(job: Job, setting: str, value: object, said: str) -> None:
    for command in (("check", job.file), ("train", job.file, "--out", job.out)):
        ended = job.command(*command, f"--{setting}", value)
        assert ended.code == 2, ended.err
        [line] = ended.err.splitlines()
        assert said in line
    assert not job.out.exists()
