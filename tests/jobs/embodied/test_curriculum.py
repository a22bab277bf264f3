"""A curriculum that follows the success rate, in both jobs."""

from __future__ import annotations

import pathlib
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest

from rlinf_async.observe.samples import read_samples
from rlinf_async.runtime.jobs.embodied.curriculum import Climb, CurriculumConfig
from tests.jobs import kit as jobs
from tests.jobs.embodied.kit import Job
from tests.jobs.embodied_sac.kit import Job as SacJob
from tests.jobs.processes import Start

WANTED = CurriculumConfig(levels=({"far": 1}, {"far": 2}, {"far": 3}), success_rate=0.5, episodes=4)


class Far(gymnasium.Env[Any, Any]):
    """Episodes of four steps, of which the last pays how far it was to go, and all succeed."""

    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.far, self.at = (options or {"far": -1})["far"], 0
        return np.array([self.far, self.at], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        done = self.at == 4
        shown = np.array([self.far, self.at], np.float32)
        return shown, float(self.far * done), done, False, {"is_success": True}


FAR = ("--env.id", "", "--env.entry_point", f"{__name__}:Far")
LEVELS = (
    *FAR,
    *("--curriculum.levels", "[{far = 1}, {far = 2}, {far = 3}]"),
    *("--curriculum.success_rate", 1.0, "--curriculum.episodes", 24),
)


@pytest.fixture(params=["ppo", "sac"])
def job(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> jobs.Job[Any]:
    return (Job if request.param == "ppo" else SacJob)(tmp_path, capsys)


def test_a_level_ends_when_enough_of_its_own_last_episodes_have_succeeded() -> None:
    climb = Climb().under(WANTED)
    ticket = climb.ticket
    assert ticket is not None
    assert (ticket.number, ticket.options) == (0, {"far": 1})
    climb = climb.after([0, 1, 0, 0], [False, True, None, True])  # of another level: not counted
    assert (climb.level, climb.successes) == (0, (False, False, True))
    assert climb.columns() == {"level": 0.0, "level_episodes": 3.0, "level_success_rate": 1 / 3}
    climb = climb.after([0, 0, 1, 0], [True, True, True, False])
    assert (climb.level, climb.successes) == (1, (True,))  # the fourth made it half; then level 1
    climb = climb.after([1] * 3 + [2] * 5, [True] * 3 + [False] * 5)
    assert (climb.level, climb.successes) == (2, (False,) * 4)
    assert climb.after([2] * 4, [True] * 4).level == 2  # the last goes on
    assert climb.under(WANTED) == climb
    assert climb.under(CurriculumConfig(levels=({}, {}))).level == 0
    assert Climb().after([], [True]) == Climb()
    assert Climb().ticket is None


def kept(job: jobs.Job[Any], kind: Literal["training", "evaluation"]) -> list[dict[str, Any]]:
    return read_samples(job.out, kind=kind)


def check(job: jobs.Job[Any]) -> None:
    """Every episode is of the level that it says; each level has as many as it needs."""
    episodes = kept(job, "training")
    assert all(one["reward"] == one["level"] + 1 for one in episodes)  # how far it was to go
    counts = [sum(one["level"] == level for one in episodes) for level in range(3)]
    rows = job.iterations
    assert sum(counts) == int(rows[-1]["episodes"])
    levels = [int(row["level"]) for row in rows]
    assert levels == sorted(levels)
    for level in range(levels[-1]):
        assert counts[level] >= 24
        first = levels.index(level + 1)
        before = [one for one in episodes if one["level"] == level and one["iteration"] < first]
        assert len(before) < 24
    assert all(one["reward"] == 3.0 for one in kept(job, "evaluation"))


@pytest.mark.parametrize("form", [(), ("--env.simulator", "pool")], ids=["single", "pool"])
def test_levels_follow_each_other_and_a_resumed_run_goes_on(
    job: jobs.Job[Any], form: tuple[object, ...]
) -> None:
    steps = 64 if isinstance(job, Job) else 32
    job.succeed(*LEVELS, *form, "--training.total_steps", 3 * steps)
    check(job)
    assert 0 <= int(job.iterations[-1]["level"]) < 2
    job.succeed(*LEVELS, *form, "--training.total_steps", 10 * steps, "--resume")
    check(job)
    assert int(job.iterations[-1]["level"]) == 2
    rates = {row["level_success_rate"] for row in job.iterations}
    assert rates <= {"", "1"}
    stop = ("--training.stop_at.metric", "level", "--training.stop_at.least", 2)
    assert job.command("check", job.file, *LEVELS, *form, *stop).code == 0


def test_a_killed_driver_goes_on_counting_from_its_checkpoint(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], start_driver: Start
) -> None:
    job = Job(tmp_path, capsys)
    path = job.out / "metrics.csv"

    def booked() -> int:
        return path.read_text().count("\n") - 1 if path.exists() else 0

    endless = ("--training.total_steps", 10**9, "--cluster.backend", "process")
    many = (*LEVELS, "--curriculum.episodes", 100)
    driver = start_driver("train", job.file, "--out", job.out, *many, *endless)
    driver.until(lambda: booked() >= 3, "three iterations")
    driver.kill()
    assert driver.wait() == -9
    iterations = booked() + 20
    job.succeed(*many, "--resume", "--training.total_steps", 64 * iterations)
    episodes = kept(job, "training")
    assert len(episodes) == int(job.iterations[-1]["episodes"])
    levels = [int(row["level"]) for row in job.iterations]
    first = levels.index(1)
    ended = [one for one in episodes if one["level"] == 0]
    assert (
        sum(one["iteration"] < first for one in ended)
        < 100
        <= sum(one["iteration"] <= first for one in ended)
    )


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--curriculum.episodes", 3), "curriculum.episodes: 3 was given, but there are no levels"),
        (("--curriculum.levels", "[{far = 1}]"), "curriculum.levels: there is one level, so none"),
        ((*LEVELS, "--env.options", "{far = 1}"), "env.options: {'far': 1} would have no effect"),
        ((*LEVELS, "--env.simulator", "vector"), "curriculum.levels: simulator = 'vector' begins"),
        ((*LEVELS, "--curriculum.success_rate", 1.5), "success_rate is 1.5"),
        (
            ("--env.options", "{far = 1}", "--env.simulator", "vector"),
            "env.options: {'far': 1} were given, but simulator = 'vector' begins episodes",
        ),
    ],
)
def test_a_curriculum_that_would_have_no_effect_is_named(
    job: jobs.Job[Any], words: tuple[object, ...], message: str
) -> None:
    ended = job.command("check", job.file, *words)
    assert ended.code == 2, ended.err
    assert message in ended.err


def test_options_are_those_of_each_reset(job: jobs.Job[Any]) -> None:
    steps = 64 if isinstance(job, Job) else 32
    job.succeed(*FAR, "--env.options", "{far = 2}", "--training.total_steps", 3 * steps)
    assert {one["reward"] for one in read_samples(job.out)} == {2.0}


def test_training_is_judged_by_the_last_level_once_it_is_full(job: jobs.Job[Any]) -> None:
    stop = ("--training.stop_at.metric", "level_success_rate", "--training.stop_at.least", 0.5)
    job.succeed(*LEVELS, "--curriculum.episodes", 4, *stop)
    last = job.iterations[-1]
    assert (float(last["level"]), float(last["level_episodes"])) == (2, 4)
    assert job.summary.reached is not None
