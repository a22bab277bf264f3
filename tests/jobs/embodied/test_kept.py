"""What a run in environments keeps of its episodes is what it counts, each once."""

from __future__ import annotations

import numpy as np

from rlinf_async.observe.metrics import read_columns
from rlinf_async.observe.samples import read_samples
from tests.jobs.embodied.kit import Job


def counted(job: Job) -> float:
    """Episodes that the metrics have."""
    return float(np.nanmax(read_columns(job.out / "metrics.csv")["episodes"]))


def test_every_episode_is_kept_once_also_over_a_resume(job: Job) -> None:
    job.succeed("--evaluation.before", "true")
    first = read_samples(job.out, kind="training")
    assert len(first) == counted(job) > 0
    assert all(one["trained"] and one["size"] > 0 for one in first)
    evaluated = read_samples(job.out, kind="evaluation")
    assert {one["iteration"] for one in evaluated} == {0, job.summary.iterations}
    last = [one["reward"] for one in evaluated if one["iteration"]]
    assert job.summary.return_ == sum(last) / len(last)
    printed = job.command("samples", job.out, "--best", 1, "--kind", "training")
    assert printed.code == 0
    assert " steps" in printed.out
    job.succeed("--resume", "--training.total_steps", 512)
    more = read_samples(job.out, kind="training")
    assert more[: len(first)] == first
    assert len(more) == len({one["name"] for one in more}) > len(first)
    assert len(more) == counted(job)
