"""What a run makes of failures beside its training: unscored samples, rewards that teach nothing,
tasks that nobody awaits."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

from rlinf_async.messages.language import Failed
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.language.learners import Trained
from rlinf_async.runtime.jobs.language.rows import Groups


class NothingScored(RuntimeError):
    """Every sample of an iteration failed in its verifier; the message has the first error."""


def look_at_failures(run: str, iteration: int, groups: Groups, *, told: bool) -> None:
    """Tell of the first sample that could not be scored.

    Args:
        run: its name.
        iteration: that was trained.
        groups: of it.
        told: a failure of this run was told already.

    Raises:
        NothingScored: none could: going on would train on nothing.
    """
    outcomes = [one.outcome for group in groups for one in group]
    errors = [outcome.error for outcome in outcomes if isinstance(outcome, Failed)]
    if not errors:
        return
    if len(errors) == len(outcomes):
        raise NothingScored(
            f"all {len(errors)} samples of iteration {iteration} failed to be scored, the first "
            f"with: {errors[0]}. There is nothing to learn from: mend the verifier (or "
            "reward.time_limit), and go on with --resume"
        )
    if not told:
        print(
            f"{run}: {len(errors)} of {len(outcomes)} samples of iteration {iteration} failed to "
            f"be scored and train nothing, the first with: {errors[0]} (said once; the summary "
            "counts them)",
            file=sys.stderr,
        )


def look_at_signal(run: str, iteration: int, trained: Trained, *, told: bool) -> bool:
    """Tell of the first iteration in which no group had anything to learn from.

    That may be chance, or the end of what these tasks can teach, so the run goes on. Whether it was
    told, now or before.
    """
    groups = sum(one.groups for one in trained.actors)
    if told or not groups or sum(one.groups_without_signal for one in trained.actors) < groups:
        return told
    print(
        f"{run}: in each of the {groups} groups of iteration {iteration} all rewards are equal: "
        "there was nothing to learn from. Are the tasks too hard, too easy, or is the verifier "
        "always of one opinion? (said once; see the column groups_without_signal)",
        file=sys.stderr,
    )
    return True


def beside(cluster: Cluster, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Do this beside the training; if it fails, everything that waits for it ends with it."""
    task = asyncio.create_task(work, name=name)

    def ended(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            cluster.abort(error)

    task.add_done_callback(ended)
    return task
