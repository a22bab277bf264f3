"""An environment that tells of its successes alone: silence is none, wherever it is counted."""

from __future__ import annotations

import csv
import json
import pathlib
from typing import Any

import pytest

from rlinf_async.data.demonstrations import read_info
from tests.jobs.embodied.kit import Job

HERE = "tests.workers.env.test_success"
RARE = (
    *("--env.id", "", "--env.entry_point", f"{HERE}:Rare", "--training.total_steps", 64),
    *("--evaluation.target_success_rate", 0.9),
)
VECTOR = (
    *("--env.entry_point", f"{HERE}:many", "--env.simulator", "vector"),
    *("--env.kwargs.mode", "SAME_STEP"),
)


@pytest.mark.parametrize("form", [(), VECTOR], ids=["single", "vector"])
def test_a_run_with_one_success_in_five_falls_short_and_says_how_many_said_nothing(
    job: Job, form: tuple[object, ...]
) -> None:
    ended = job.train(*RARE, *form, "--evaluation.episodes", 20, "--env.envs", 2)
    assert ended.code == 1
    # Two environments in as many stages, each of which plays ten episodes.
    assert (job.summary.outcome, job.summary.success_rate) == ("fell short", 0.2)
    assert (job.summary.success_unreported, job.summary.evaluation_episodes) == (16, 20)
    assert "fell short: success rate 0.20, 16 of 20 episodes did not say" in ended.out
    assert ended.err.count("reports success (True or False") == 1
    first = job.iterations[0]
    assert (float(first["success_rate"]), float(first["success_unreported"])) == (0.125, 14)
    with (job.out / "metrics.csv").open(newline="") as file:
        assert float([*csv.DictReader(file)][-1]["eval_success_unreported"]) == 16


def test_an_evaluation_without_a_word_is_judged_where_the_training_had_some(job: Job) -> None:
    assert job.train(*RARE, "--evaluation.before", "true").code == 1
    assert (job.summary.outcome, job.summary.success_rate) == ("fell short", 0.0)
    assert job.summary.success_rate_before == 0.0
    told = json.loads(job.command("evaluate", job.out, "--json").out)
    assert (told["success_rate"], told["success_unreported"]) == (0.0, 3)
    again = job.command("evaluate", job.out, "--episodes", 20)
    assert "success rate 0.20, 16 of 20 episodes did not say" in again.out


@pytest.mark.parametrize(("wanted", "kept"), [((), 2), (("--keep-failures",), 6)])
def test_demonstrations_keep_no_silent_failures(
    job: Job, tmp_path: pathlib.Path, wanted: tuple[str, ...], kept: int
) -> None:
    out = tmp_path / "demonstrations"
    options = ("--policy", f"{__name__}:zeros", "--episodes", kept, "--out", out, *wanted)
    rare = job.file.read_text().replace('id = "CartPole-v1"', f'entry_point = "{HERE}:Rare"')
    job.file.write_text(rare)
    ended = job.command("demonstrations", job.file, *options)
    assert (ended.code, ended.err) == (0, "")
    info = read_info(out)
    assert (info.episodes, info.successes) == (kept, 2 if kept == 2 else 1)
    assert len(list(out.glob("*.npz"))) == kept


def zeros(env: Any, seed: int) -> Any:
    """A scripted policy."""
    return lambda observation: 0
