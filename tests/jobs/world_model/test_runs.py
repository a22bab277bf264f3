"""A run learns a model of an environment, says how far they are apart, and leaves it; another one
trains a policy in it, and is judged in reality."""

from __future__ import annotations

import csv
import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlinf_async.backends.world_model.config import read_info
from rlinf_async.observe.summary import EmbodiedSummary
from tests.jobs import kit as jobs
from tests.jobs.world_model.kit import Job

IMAGINED = """\
job = "embodied_ppo"
name = "imagined"

[env]
id = "a line in a model"
entry_point = "rlinf_async.workers.env.adapters.world_model:make"
kwargs = {{model = "{model}", success = "terminated"}}
simulator = "vector"
envs = 8
stages = 2
actions = "rescale"

[training]
total_steps = 256
steps_per_iteration = 16

[actor.ppo]
epochs = 1
minibatch_size = 32

[evaluation]
episodes = 6
video_episodes = 1

[evaluation.env]
entry_point = "tests.jobs.world_model.envs:Line"
actions = "rescale"

[cluster]
backend = "local"
rollout_workers = 0
"""


def test_a_run_learns_a_model_and_says_how_far_it_is_from_reality(job: Job) -> None:
    ended = job.train("--training.measure_every", 2)
    assert ended.code == 0, ended.err
    losses = [float(one) for one in job.losses]
    assert losses[-1] < 0.5 * losses[0]
    with (job.out / "metrics.csv").open(newline="") as file:
        measured = [row for row in csv.DictReader(file) if row["eval_reward_error_1"]]
    assert [int(row["step"]) for row in measured] == [0, 2, 4]
    first, last = (float(measured[at]["eval_state_error_k"]) for at in (0, -1))
    assert last < 0.5 * first
    assert last < float(measured[-1]["eval_still_state_error_k"])
    assert "model and reality after 1 step: state off by" in ended.out
    assert "return of an episode in the model" in ended.out
    assert job.summary.measured["state_error_k"] == pytest.approx(last)
    info = read_info(job.model)
    assert info.env == "tests.jobs.world_model.envs:Line"
    assert info.bounds == ((-2.0, 2.0),)


def test_a_run_that_is_resumed_learns_what_one_run_does(job: Job, tmp_path: pathlib.Path) -> None:
    job.succeed()
    whole, expected = job.losses, load_file(job.model)
    job.out = tmp_path / "again"
    job.succeed("--training.steps", 40)
    job.succeed("--training.steps", 80, "--resume")
    assert job.losses == whole
    found = load_file(job.model)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_folders_of_recorded_episodes_give_the_same_model(job: Job, tmp_path: pathlib.Path) -> None:
    job.succeed("--training.steps", 20)
    recorded = job.out / "demonstrations"
    info = json.loads((recorded / "demonstrations.json").read_bytes())
    assert info["successes"] < info["episodes"] == 24  # failures are kept
    first = job.losses
    job.out = tmp_path / "given"
    given = ("--data.folders", json.dumps([str(recorded)]), "--demonstrations.policy", "")
    job.succeed("--training.steps", 20, *given)
    assert job.losses == first


def test_ranks_learn_what_one_rank_does(job: Job, tmp_path: pathlib.Path) -> None:
    given = ("--training.steps", 20, "--training.steps_per_iteration", 10)
    job.succeed(*given)
    alone = [float(one) for one in job.losses]
    job.out = tmp_path / "two"
    job.succeed(*given, "--cluster.backend", "process", "--cluster.actors", 2)
    assert [float(one) for one in job.losses] == pytest.approx(alone, rel=1e-4)


def test_a_policy_trained_in_the_model_is_judged_in_reality(
    job: Job, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.succeed()
    text = IMAGINED.format(model=job.model)
    one = jobs.Job(tmp_path / "imagined.toml", text, capsys, EmbodiedSummary)
    one.out = tmp_path / "imagined"
    summary = one.succeed()
    assert summary.evaluation_episodes == 6
    assert summary.success_rate is not None
    assert summary.return_in_training is not None
    assert summary.success_rate_in_training is not None
    ended = one.command("evaluate", one.out, "--json")
    assert ended.code == 0, ended.err
    again = json.loads(ended.out)
    assert again["return"] == pytest.approx(summary.return_, abs=1e-5)  # of reality, too
    assert one.succeed("--training.total_steps", 384, "--resume").env_steps == 384
    episodes = (one.out / "inputs.json").read_text()
    assert str(job.model) in episodes  # another model is named on a resume
