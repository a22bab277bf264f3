"""The evaluation of a run in environments, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.embodied.channels import EmbodiedChannels
from rlinf_async.runtime.jobs.embodied.collectors import Collectors
from rlinf_async.runtime.jobs.embodied.reports import (
    EmbodiedProgress,
    evaluated_rate,
    mean_return,
    unreported,
)
from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings
from rlinf_async.runtime.jobs.failures import in_background
from rlinf_async.runtime.jobs.view import LiveView
from rlinf_async.workers.env import EvaluatedEpisode, EvaluationPlan


async def evaluate(
    cluster: Cluster,
    config: EnvironmentSettings,
    channels: EmbodiedChannels,
    collectors: Collectors,
    view: LiveView,
    *,
    min_version: int,
) -> list[EvaluatedEpisode]:
    """Run the configured episodes with weights of at least this version; show how far it is."""
    wanted = config.evaluation
    plan = EvaluationPlan(episodes=wanted.episodes, seed=wanted.seed, min_version=min_version)
    with in_background(cluster, _count(wanted.episodes, channels, view), "evaluation"):
        return await collectors.evaluate(plan)


async def _count(wanted: int, channels: EmbodiedChannels, view: LiveView) -> None:
    view.note = f"evaluating: 0 of {wanted} episodes"
    done = set[int]()  # an env worker that was restarted evaluates its share again
    async for one in channels.evaluated.receiver:
        done.add(one.episode)
        view.note = f"evaluating: {len(done)} of {wanted} episodes"


def write_evaluation(
    metrics: MetricsWriter, progress: EmbodiedProgress, episodes: Sequence[EvaluatedEpisode]
) -> None:
    """A row of its own, a step after the last: a resumed run drops it and evaluates again."""
    row = {
        "env_steps": float(progress.env_steps),
        "train_seconds": progress.train_seconds,
        "eval_return": mean_return(episodes),
    }
    rate = evaluated_rate(episodes, progress)
    if rate is not None:
        row["eval_success_rate"] = rate
        row["eval_success_unreported"] = float(unreported(episodes))
    metrics.write(progress.env_steps + 1, row)
