"""Whole runs: what they train on, and what they leave in the run folder."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlinf_async.runtime.jobs.embodied import collectors as evaluation
from rlinf_async.runtime.jobs.embodied.collectors import EmbodiedChannels
from rlinf_async.runtime.jobs.view import LiveView
from tests.interpreters import OURS, make_python, packages_of
from tests.jobs.embodied.kit import ENTRY, Job, record_training

PROCESS = ("--cluster.backend", "process")
TOGETHER = ("--cluster.rollout_workers", 0)


@pytest.mark.parametrize("form", [(), TOGETHER], ids=["apart", "together"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_run_leaves_records_that_agree(job: Job, form: tuple[object, ...], env: str) -> None:
    summary = job.succeed("--env.id", env, *form)
    job.check_records(6, 64)
    assert summary.outcome == "finished"
    assert summary.evaluation_episodes == 3
    assert summary.restarts == {}
    assert set(summary.dropped.values()) == {0}
    assert job.checkpoints == ["version-000004", "version-000006"]


@pytest.mark.slow
def test_env_workers_have_a_python_of_their_own(job: Job, tmp_path: pathlib.Path) -> None:
    python = make_python(tmp_path / "walks", OURS)
    walks = packages_of(tmp_path / "walks") / "only_walks.py"
    register = f"gymnasium.register('Walk-v9', '{ENTRY}:Walk', max_episode_steps=10)"
    walks.write_text(f"import gymnasium\n{register}\n")
    walk = ("--env.id", "only_walks:Walk-v9", *PROCESS)
    ended = job.train(*walk)
    assert ended.code == 2
    assert "only_walks" in ended.err
    role = ("--cluster.placement.env.python", python)
    for form in ((), TOGETHER):
        job.succeed(*walk, *role, *form, "--cluster.max_restarts", 0)
        job.check_records(6, 64)
        shutil.rmtree(job.out)
    with walks.open("a") as file:
        file.write("import os\nos.environ['OF_THE_ROLE']\n")
    ended = job.train(*walk, *role)
    assert ended.code == 2
    assert "KeyError: 'OF_THE_ROLE'" in ended.err
    job.succeed(*walk, *role, "--cluster.placement.env.env_vars.OF_THE_ROLE", "yes")
    shutil.rmtree(job.out)
    ended = job.train(*walk, "--cluster.placement.env.python", "/no/python")
    assert ended.code == 2
    assert "cluster.placement.env.python: '/no/python': it cannot be run: [Errno 2]" in ended.err


def test_tensorboard_shows_what_the_csv_holds(job: Job) -> None:
    job.succeed()
    accumulator = EventAccumulator(str(job.out / "tensorboard"))
    accumulator.Reload()
    shown = [(one.step, one.value) for one in accumulator.Scalars("value_loss")]
    rows = [(int(row["step"]), float(row["value_loss"])) for row in job.iterations]
    assert [step for step, _ in shown] == [step for step, _ in rows]
    assert [value for _, value in shown] == pytest.approx([value for _, value in rows])


@pytest.mark.parametrize("form", [(), TOGETHER], ids=["apart", "together"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_every_step_is_acted_by_a_version_that_is_allowed(
    job: Job, monkeypatch: pytest.MonkeyPatch, form: tuple[object, ...], staleness: int
) -> None:
    trained = record_training(monkeypatch)
    two = ("--cluster.env_workers", 2, "--training.total_steps", 768)
    summary = job.succeed("--training.max_staleness", staleness, *two, *form)
    assert [one.version for one in trained] == [*range(6)]
    for version, batch in trained:
        places = [(one.iteration, one.env_rank, one.stage) for one in batch]
        assert places == [(version, rank, stage) for rank in (0, 1) for stage in (0, 1)]
        lags = {version - int(acted) for one in batch for acted in one.version}
        assert lags <= set(range(min(version, staleness) + 1))  # 0: exactly on-policy
    assert summary.staleness is not None
    assert summary.staleness.max <= summary.staleness.allowed == staleness
    job.check_records(6, 128)
    for row in job.iterations:
        assert bool(row.get("off_policy_weight")) is (float(row["staleness_max"]) > 0)


def test_epochs_of_an_iteration_are_trained_together_with_one_version(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a trajectory of its own, with its own bootstrap; episodes go on from one to the
    next."""
    trained = record_training(monkeypatch)
    job.succeed("--training.rollout_epochs", 3, "--training.steps_per_iteration", 8, *TOGETHER)
    job.check_records(4, 96)
    for version, batch in trained:
        places = [(one.iteration, one.stage, one.epoch) for one in batch]
        assert places == [(version, stage, epoch) for stage in (0, 1) for epoch in range(3)]
        assert {int(acted) for one in batch for acted in one.version} == {version}
    lengths = [length for call in trained for one in call.batch for length in one.episode_length]
    assert max(lengths) > 8  # an episode of CartPole that began in one epoch ended in another


def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(name: str, seed: int) -> list[str]:
        job.out = job.file.parent / name
        one_at_a_time = ("--env.stages", 1, "--training.total_steps", 192)  # else: first ready
        job.succeed("--seed", seed, *one_at_a_time, *TOGETHER)
        return [row["value_loss"] for row in job.iterations]

    first = losses("first", 3)
    assert losses("again", 3) == first
    assert losses("other", 4) != first


def test_a_run_that_missed_its_target_says_so(job: Job) -> None:
    ended = job.train("--evaluation.target_return", 1e6, "--training.total_steps", 64)
    assert ended.code == 1
    assert job.summary.outcome == "fell short"
    last = ended.out.splitlines()[-1]
    assert last.startswith("small fell short: return")
    assert str(job.out) in last


def test_a_finished_run_that_is_resumed_only_evaluates_again(job: Job) -> None:
    before = job.succeed()
    summary = job.succeed("--resume")
    job.check_records(6, 64, resumed=True)
    assert summary.return_ == before.return_
    assert job.trained_in_trace() == []


def test_a_resumed_run_goes_on_to_a_later_end(job: Job) -> None:
    job.succeed("--training.total_steps", 256)
    job.succeed("--training.total_steps", 512, "--resume")
    job.check_records(8, 64, resumed=True)
    assert job.trained_in_trace() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "form", [("--training.max_staleness", 1), TOGETHER], ids=["apart", "together"]
)
def test_workers_in_processes_share_the_work(job: Job, form: tuple[object, ...]) -> None:
    many = ("--cluster.env_workers", 2, "--cluster.actors", 2, "--training.total_steps", 512)
    job.succeed(*PROCESS, *many, *form)
    job.check_records(4, 128)
    assert float(job.iterations[-1]["episodes"]) > 0


def test_resuming_where_no_run_is_says_so_once_and_starts(job: Job) -> None:
    ended = job.train("--resume", "--training.total_steps", 64)
    assert ended.code == 0
    assert ended.err.count("nothing to resume") == 1


def test_a_success_that_the_environment_does_not_report_reaches_no_target(job: Job) -> None:
    targets = ("--evaluation.target_success_rate", 0.9, "--evaluation.target_return", 0.0)
    ended = job.train(*targets)
    assert ended.code == 1
    assert ended.err.count("CartPole-v1 has reported no success") == 1
    assert job.summary.outcome == "fell short"
    assert job.summary.extra["target_success_rate"] == "not reached: no success was reported"


@pytest.mark.parametrize("form", [(), TOGETHER], ids=["apart", "together"])
def test_the_evaluation_says_how_many_episodes_are_done(
    job: Job, monkeypatch: pytest.MonkeyPatch, form: tuple[object, ...]
) -> None:
    notes: list[str] = []

    class Notes:
        def __setattr__(self, name: str, note: str) -> None:
            notes.append(note)

    count: Any = evaluation._count

    async def noted(wanted: int, channels: EmbodiedChannels, view: LiveView) -> None:
        await count(wanted, channels, Notes())

    monkeypatch.setattr(evaluation, "_count", noted)
    job.succeed(*form)
    assert notes[:2] == ["evaluating: 0 of 3 episodes", "evaluating: 1 of 3 episodes"]
