"""What a run says it did, against what it had to do: nothing doubled, nothing lost."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import msgspec

from rlinf_async.observe.summary import EmbodiedSummary, read_summary
from rlinf_async.workers.replay.worker import read_state
from tests.jobs.embodied_kills.plan import Plan


class Accounts(msgspec.Struct, frozen=True):
    """Of a run that came to its end."""

    iterations: int
    doubled: int
    """iterations, environment steps, transitions, the person's too, and
    gradient steps that were counted twice"""
    lost: int
    left_out: int
    """second deliveries that the run has noticed, and left out"""
    failed: int
    """episodes that ended with the process of their environment"""
    reached: bool
    """whether the target was"""
    result: float | None
    """mean return of the evaluation"""


def accounts(made: Plan, out: Path) -> Accounts:
    """Read what a run left."""
    with (out / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["iteration"]]
    summary = read_summary(out / "summary.json", EmbodiedSummary)
    steps, iterations = made.iteration_steps, made.iterations
    found = Counter(int(row["iteration"]) for row in rows)
    wrong = [
        *(found[iteration] - 1 for iteration in range(iterations)),
        *(1 for iteration in found if iteration >= iterations),
        summary.iterations - iterations,
        summary.env_steps - iterations * steps,
        *(int(row["step"]) - steps * count for count, row in enumerate(rows[:iterations], start=1)),
    ]
    if made.kind == "sac":
        note = json.loads((out / "checkpoints/latest.json").read_bytes())
        state = read_state(out / "checkpoints" / note["checkpoint"] / "replay/state.json")
        updates = iterations * steps - 480
        acted = sum(round(float(row["intervention_share"]) * steps) for row in rows)
        wrong += [
            (state.count if state else 0) - iterations * steps,
            (state.intervened if state else 0) - acted,
            int(str(summary.extra["gradient steps"])) - updates,
            int(sum(float(row["updates"] or 0.0) for row in rows)) - updates,
        ]
    return Accounts(
        iterations=summary.iterations,
        doubled=sum(one for one in wrong if one > 0),
        lost=-sum(one for one in wrong if one < 0),
        left_out=sum(summary.dropped.values()),
        failed=summary.failed_episodes,
        reached=summary.outcome == "succeeded",
        result=summary.return_,
    )
