"""Runs whose rewards and successes a function of the user's own says, in both jobs."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from rlinf_async.backends.success.classifier import (
    ClassifierInfo,
    Figures,
    SuccessClassifier,
)
from rlinf_async.messages.spaces import ObservationPart, ObservationSpec
from rlinf_async.observe.samples import read_samples
from rlinf_async.workers.env.labels import Steps
from tests.jobs import kit as jobs
from tests.jobs.embodied import test_curriculum as curriculum
from tests.jobs.embodied.kit import Job
from tests.jobs.embodied_sac.kit import Job as SacJob

FAR = ("--env.id", "", "--env.entry_point", f"{curriculum.__name__}:Far")
LABELLED = (*FAR, "--env.reward.function", f"{__name__}:late")


def late(steps: Steps) -> Any:
    """Pays how far the episode is, and succeeds from its third step on."""
    at = steps.next_observation[:, 1]
    return at, at >= 3


def silent(steps: Steps) -> Any:
    return steps.reward


def person(observation: Any, proposed: Any) -> Any:
    return np.full(1, 0.25, np.float32)


def stored(job: jobs.Job[Any], name: str) -> Any:
    return np.fromfile(job.out / "replay" / f"{name}.bin", np.float32)


@pytest.fixture(params=["ppo", "sac"])
def job(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> jobs.Job[Any]:
    return (Job if request.param == "ppo" else SacJob)(tmp_path, capsys)


def check(job: jobs.Job[Any], *, episode: float, success: bool, judged: float) -> None:
    for kind, reward in (("training", episode), ("evaluation", judged)):
        found = read_samples(job.out, kind=kind)  # type: ignore[arg-type]
        assert {one["reward"] for one in found} == {reward}
    assert {row["success_rate"] for row in job.iterations} == {str(int(success))}
    assert {float(row["return"]) for row in job.iterations} == {episode}


def test_training_and_evaluation_see_the_labels(job: jobs.Job[Any]) -> None:
    steps = 64 if isinstance(job, Job) else 32
    stop = ("--training.stop_at.metric", "success_rate", "--training.stop_at.least", 1.0)
    window = ("--training.return_window", 8)
    job.succeed(*LABELLED, "--training.total_steps", 4 * steps, *stop, *window)
    assert len(job.iterations) < 4
    check(job, episode=10.0, success=True, judged=10.0)
    if isinstance(job, SacJob):
        np.testing.assert_array_equal(np.unique(stored(job, "reward")[:32]), [1.0, 2.0, 3.0, 4.0])
    ended = job.train(
        *LABELLED[:-1], f"{__name__}:silent", "--training.total_steps", 5 * steps, "--resume"
    )
    assert ended.code == 2
    assert "env.reward.function" in ended.err


def test_another_environment_judges_by_its_own_reward(job: jobs.Job[Any]) -> None:
    steps = 64 if isinstance(job, Job) else 32
    judging: tuple[object, ...] = ("--evaluation.env.entry_point", f"{curriculum.__name__}:Far")
    if isinstance(job, SacJob):
        judging += ("--evaluation.env.actions", "rescale", "--training.learning_starts", 16)
    job.succeed(*LABELLED, "--env.reward.ends", "true", *judging, "--training.total_steps", steps)
    # Three steps, of which the last succeeds; the environment itself pays -1 at the end of four.
    check(job, episode=6.0, success=True, judged=-1.0)


def later_than(at: float) -> SuccessClassifier:
    """What a classifier is that has learnt that steps after this one are successes."""
    spec = ObservationSpec((ObservationPart(name="state", kind="state", shape=(2,)),))
    zeros: dict[str, Any] = dict.fromkeys(Figures.__struct_fields__, 0)
    info = ClassifierInfo(
        env="far", observation=spec, layers=1, convolutions=0, figures=Figures(**zeros)
    )
    weight, bias = np.array([[0.0, 10.0]], np.float32), np.array([-10 * at], np.float32)
    tensors = {"layers.0.weight": weight, "layers.0.bias": bias}
    normal = {"mean": np.zeros(2, np.float32), "scale": np.ones(2, np.float32)}
    return SuccessClassifier(info, tensors | normal)


def test_a_classifier_pays_and_a_resumed_run_has_the_same(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, folder = Job(tmp_path, capsys), tmp_path / "classifier"
    later_than(2.5).save(folder)
    paid = (*FAR, "--env.reward.classifier", folder)
    job.succeed(*paid, "--training.total_steps", 64)
    check(job, episode=2.0, success=True, judged=2.0)
    later_than(1.5).save(folder)
    ended = job.train(*paid, "--training.total_steps", 128, "--resume")
    assert ended.code == 2
    assert "env.reward.classifier: weights.npz differs" in ended.err


def test_another_classifier_that_judges_a_resumed_run_is_said(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, folder = Job(tmp_path, capsys), tmp_path / "classifier"
    later_than(2.5).save(folder)
    env = f'{{entry_point = "{FAR[3]}", reward = {{classifier = "{folder}"}}}}'
    judged = (*FAR, "--evaluation.env", env)
    job.succeed(*judged, "--training.total_steps", 64)
    later_than(1.5).save(folder)
    ended = job.train(*judged, "--training.total_steps", 128, "--resume")
    assert ended.code == 0, ended.err
    assert "goes on with other files than before: evaluation.env.reward.classifier" in ended.err


def test_what_a_person_does_is_labelled_and_goals_in_hindsight_are_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = SacJob(tmp_path, capsys)
    acts = ("--intervention.person", f"{__name__}:person", "--intervention.deadline", 60)
    job.succeed(*LABELLED, *acts, "--training.total_steps", 96)
    check(job, episode=10.0, success=True, judged=10.0)
    assert {row["intervention_share"] for row in job.iterations} == {"1"}
    ended = job.command("check", job.file, *LABELLED, "--replay.hindsight", "future")
    assert ended.code == 2
    assert "replay.hindsight: 'future', but what a step pays is said by env.reward" in ended.err
