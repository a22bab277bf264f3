"""Runs that learn from demonstrations too: recorded by themselves, or given as a folder."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.jobs.embodied_sac.kit import STEPS, Job
from tests.jobs.embodied_sac.test_runs import PROCESS, Killer
from tests.jobs.killing import nothing_left_behind
from tests.jobs.processes import Driver

SCRIPT = f"{__name__}:expert"
SHARE = ("--replay.demonstrated_share", 0.25)
RLPD = (
    *("--actor.sac.critics", 3, "--actor.sac.target_critics", 2, "--actor.sac.policy_every", 2),
    *("--actor.sac.critic_layer_norm", "true"),
)


def expert(env: Any, seed: int) -> Callable[[Any], Any]:
    """A scripted policy for Pendulum, and no good one."""
    return lambda observation: np.clip(-observation[2:], -2.0, 2.0)


def chooser(env: Any, seed: int) -> Callable[[Any], int]:
    """One for CartPole: it pushes to where the pole falls."""
    return lambda observation: int(observation[2] > 0)


def digests(folder: pathlib.Path) -> dict[str, str]:
    files = sorted(one for one in folder.rglob("*") if one.is_file())
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in files}


def record(job: Job, *words: object) -> pathlib.Path:
    """A folder of two episodes."""
    folder = job.file.parent / "shown"
    ended = job.command(
        *("demonstrations", job.file, "--policy", SCRIPT, "--episodes", 2, "--out", folder), *words
    )
    assert ended.code == 0, ended.err
    return folder


def check_metrics(job: Job) -> None:
    for row in job.iterations:
        trained = bool(row["updates"])
        for kind in ("demonstrations", "own"):
            assert bool(row[f"value_{kind}"]) is bool(row[f"error_{kind}"]) is trained
        assert float(row["demonstrations_share"] or 0.0) == (0.25 if trained else 0.0)


def test_choices_are_demonstrated_and_learnt_from(job: Job) -> None:
    choosing = ("--env.id", "CartPole-v1", "--env.actions", "clip")
    script = ("--demonstrations.policy", f"{__name__}:chooser", "--demonstrations.episodes", 2)
    job.succeed(*choosing, *script, *SHARE, *RLPD, "--training.total_steps", 4 * STEPS)
    job.check_books(4)
    check_metrics(job)


def test_a_run_records_its_demonstrations_once_and_goes_on_with_them(job: Job) -> None:
    script = ("--demonstrations.policy", SCRIPT, "--demonstrations.episodes", 2, *SHARE, *RLPD)
    job.succeed(*script, "--training.total_steps", 4 * STEPS)
    job.check_books(4)
    recorded = digests(job.out / "demonstrations")
    assert [*recorded] == ["demonstrations.json", "episode_000000.npz", "episode_000001.npz"]
    job.succeed(*script, "--resume")
    job.check_books(6)
    assert digests(job.out / "demonstrations") == recorded
    check_metrics(job)


def test_a_killed_replay_worker_reads_its_demonstrations_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--replay.demonstrations", record(job), *SHARE, *RLPD)
    before = digests(job.file.parent / "shown")
    killer = Killer(monkeypatch)
    killer.victims = {2: "Replay[0]"}
    with nothing_left_behind():
        job.succeed(*PROCESS, *given)
    job.check_books(6)
    check_metrics(job)
    assert digests(job.file.parent / "shown") == before
    episodes = [np.load(one)["action"] for one in sorted((job.file.parent / "shown").glob("*.npz"))]
    stored = np.fromfile(job.out / "replay/demonstrations/action.bin", np.float32)
    np.testing.assert_array_equal(stored, np.concatenate(episodes).ravel())


def test_a_run_that_was_killed_goes_on_with_its_demonstrations(
    job: Job, temporary: pathlib.Path
) -> None:
    given = ("--replay.demonstrations", record(job), *SHARE)

    def booked() -> int:
        path = job.out / "metrics.csv"
        return path.read_text().count("\n") - 1 if path.exists() else 0

    endless = ("--training.total_steps", 10**6 * STEPS)
    arguments = ("train", job.file, "--out", job.out, "--resume", *PROCESS, *given)
    driver = Driver(temporary, *arguments, *endless)
    try:
        driver.until(lambda: booked() >= 5, "five iterations")
        driver.kill()
        assert driver.wait() == -9
    finally:
        driver.end()
    iterations = booked() + 3
    job.succeed(*given, "--resume", "--training.total_steps", iterations * STEPS)
    job.check_books(iterations)
    check_metrics(job)


def test_other_demonstrations_than_before_are_refused(job: Job) -> None:
    folder = record(job)
    given = ("--replay.demonstrations", folder, *SHARE)
    job.succeed(*given, "--training.total_steps", 4 * STEPS)
    for name, number in (("replay.demonstrated_share", 0.5), ("actor.sac.critics", 4)):
        ended = job.train(*given, f"--{name}", number, "--resume")
        assert (ended.code, name in ended.err) == (2, True)
    (folder / "episode_000001.npz").write_bytes((folder / "episode_000000.npz").read_bytes())
    ended = job.train(*given, "--resume")
    assert ended.code == 2
    assert "replay.demonstrations: " in ended.err
    assert "Put the old ones back" in ended.err


@pytest.mark.usefixtures("no_cluster")
def test_demonstrations_that_cannot_be_learnt_from_are_named(job: Job) -> None:
    folder = record(job)
    info = json.loads((folder / "demonstrations.json").read_text())

    def refused(said: str, *words: object) -> None:
        given = ("--replay.demonstrations", folder, *words)
        for command in (("check", job.file), ("train", job.file, "--out", job.out)):
            ended = job.command(*command, *given)
            assert ended.code == 2, ended.err
            [line] = ended.err.splitlines()
            assert said in line

    def described(**changes: object) -> None:
        (folder / "demonstrations.json").write_text(json.dumps(info | changes))

    refused("demonstrations.policy = 'a:b' would record others", "--demonstrations.policy", "a:b")
    refused("0.01 of a batch of 16 are 0 demonstr", "--replay.demonstrated_share", 0.01)
    refused("0.99 of a batch of 16 are 16 demonstr", "--replay.demonstrated_share", 0.99)
    described(transitions=False)
    refused("replay.demonstrations: the demonstrations in")
    refused("have no rewards, no terminations and no observations after the last step")
    described(env="CartPole-v1")
    refused("are of CartPole-v1, but the run is in Pendulum-v1, and learns from their rewards")
    described(rewards="function mine.py:near")
    refused("are said by function mine.py:near, and those of the run by the environment")
    described(rewards="")
    own = ("--env.reward.function", "tests.workers.env.test_labels:unsaid")
    refused("are said by the environment, and those of the run by function tests.workers", *own)
    described(action_size=2)
    refused("have 2 numbers, but the environment takes 1 numbers")
    described(bounds=[[-2.0, 2.0]])
    refused("have actions within [-2, 2], but those of the policy lie within [-1, 1]")
    described(episodes=3)
    refused("episode_000002.npz")
    assert not job.out.exists()
