"""A run that was cut anew offline goes on as it would have from its own folder."""

from __future__ import annotations

import shutil

from tests.jobs.embodied.kit import Job

ONE_AT_A_TIME = ("--env.stages", 1, "--cluster.rollout_workers", 0)  # else: first ready
LONGER = ("--training.total_steps", 256)


def test_losses_after_resuming_from_what_was_cut_are_those_after_resuming_from_the_run(
    job: Job,
) -> None:
    job.succeed(*ONE_AT_A_TIME, "--training.total_steps", 128)
    cut = job.out.parent / "cut"
    done = job.command("reshard", job.out, cut, "--dp", 3)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == (
        f"to go on from it: rlinf-async train FILE.toml --resume --out {cut}"
    )
    own = job.out.parent / "own"
    shutil.copytree(job.out, own)
    rows = []
    for out in (own, cut):
        job.out = out
        job.succeed(*ONE_AT_A_TIME, *LONGER, "--resume")
        rows.append([(one["value_loss"], one["policy_loss"]) for one in job.iterations])
    assert rows[0] == rows[1]
    assert len(rows[0]) == 4
