"""A package of parts is installed with pip; runs train with each, by configuration alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LANGUAGE = """\
job = "language_rl"
model = { config = { model_type = "qwen3" }, tokenizer = "arithmetic" }
data = { path = "sums.jsonl", verifier = "exact" }
training = { iterations = 2, prompts = 2, group_size = 2, metrics = [] }
evaluation = { samples = 0 }
cluster = { backend = "process" }

[rollout]
backend = "letters"
options = { length = 3 }
sampling = { max_tokens = 8 }

[actor]
backend = "counting"
options = { times = 2.0 }
"""
EMBODIED = """\
job = "embodied_ppo"
env = { entry_point = "line", kwargs = { steps = 4 }, envs = 2, stages = 1 }
training = { total_steps = 16, steps_per_iteration = 8, metrics = [] }
evaluation = { episodes = 1, video_episodes = 0 }
cluster = { backend = "process" }

[actor.ppo]
minibatch_size = 8

[actor.advantage]
name = "halved"

[actor.fsdp.policy]
name = "small"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package is installed into."""
    pytest.importorskip("setuptools")
    source, target = tmp_path_factory.mktemp("source") / "it", tmp_path_factory.mktemp("site")
    shutil.copytree(Path(__file__).parent, source)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", target)
    command = (sys.executable, "-m", "pip", "install", *options, source)
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def rlinf_async(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(installed), str(Path(__file__).parents[2] / "src")])
    return subprocess.run(
        [sys.executable, "-m", "rlinf_async", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def rows(folder: Path) -> list[dict[str, str]]:
    head, *lines = (folder / "run/metrics.csv").read_text().splitlines()
    return [dict(zip(head.split(","), line.split(","), strict=True)) for line in lines]


def test_an_engine_and_a_trainer_of_a_package_train(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    (tmp_path / "run.toml").write_text(LANGUAGE)
    done = rlinf_async(installed, tmp_path, "train", "run.toml", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["samples"] == 8
    assert [float(one["policy_loss"]) for one in rows(tmp_path)] == [24.0, 24.0]


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("rollout.options.length", "9", "length is 9, more than rollout.sampling.max_tokens"),
        ("rollout.options.size", "9", "valid names here: length"),
        ("actor.options.times", "often", "expected a number"),
        ("actor.tp", "2", "the backend 'counting' does not cut a model so"),
        ("rollout.backend", "lettres", "did you mean 'letters'?"),
    ],
)
def test_what_a_part_refuses_ends_the_command_with_the_setting(
    installed: Path, tmp_path: Path, setting: str, value: str, says: str
) -> None:
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    (tmp_path / "run.toml").write_text(LANGUAGE)
    done = rlinf_async(installed, tmp_path, "check", "run.toml", f"--{setting}", value)
    assert done.returncode == 2
    assert setting in done.stderr
    assert says in done.stderr


def test_an_environment_a_policy_and_an_advantage_of_a_package_train(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(EMBODIED)
    done = rlinf_async(installed, tmp_path, "train", "run.toml", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["env_steps"] == 16
