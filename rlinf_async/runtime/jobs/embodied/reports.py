"""What an embodied run reports: progress, rows of the metrics, the top line of the live view."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from rlinf_async.messages.embodied import TrainReport
from rlinf_async.observe.progress import figure
from rlinf_async.observe.summary import EmbodiedSummary, Staleness
from rlinf_async.runtime.jobs.checkpoints import RunProgress
from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings
from rlinf_async.runtime.jobs.failures import Stopped
from rlinf_async.runtime.jobs.view import Headline
from rlinf_async.workers.env import EvaluatedEpisode


class EmbodiedProgress(RunProgress, kw_only=True):
    """How far an embodied run has come."""

    env_steps: int = 0
    episodes: int = 0
    returns: list[float] = msgspec.field(default_factory=list)
    """returns of the last episodes"""
    successes: list[bool] = msgspec.field(default_factory=list)
    """whether they succeeded, of those whose environment says so"""

    def take(self, report: TrainReport, seconds: float, window: int) -> None:
        """Add one iteration."""
        self.version = report.version
        self.env_steps += report.env_steps
        self.train_seconds = seconds
        self.episodes += len(report.episode_return)
        self.lag_sum += report.lag_mean
        self.lag_max = max(self.lag_max, report.lag_max)
        self.duplicates += report.duplicates
        self.returns = list(deque([*self.returns, *report.episode_return], window))
        self.successes = list(deque([*self.successes, *report.episode_success], window))


def merged(parts: Sequence[TrainReport]) -> TrainReport:
    """The report of an iteration, from those of all ranks.

    Counts add up; metrics and staleness are means: all shares are equal.
    """
    return msgspec.structs.replace(
        parts[0],
        metrics={
            name: sum(one.metrics[name] for one in parts) / len(parts) for name in parts[0].metrics
        },
        env_steps=sum(one.env_steps for one in parts),
        lag_mean=sum(one.lag_mean for one in parts) / len(parts),
        lag_max=max(one.lag_max for one in parts),
        duplicates=sum(one.duplicates for one in parts),
        episode_return=[value for one in parts for value in one.episode_return],
        episode_length=[value for one in parts for value in one.episode_length],
        episode_success=[value for one in parts for value in one.episode_success],
    )


def row(progress: EmbodiedProgress, report: TrainReport) -> dict[str, float]:
    """One row of the metrics. What was not measured stays out."""
    row = {
        "iteration": float(report.iteration),
        "version": float(report.version),
        "env_steps": float(progress.env_steps),
        "train_seconds": progress.train_seconds,
        "steps_per_second": progress.env_steps / max(progress.train_seconds, 1e-9),
        "episodes": float(progress.episodes),
        "staleness_mean": report.lag_mean,
        "staleness_max": float(report.lag_max),
        "second_trajectories": float(report.duplicates),
        **report.metrics,
    }
    if progress.returns:
        row["return"] = sum(progress.returns) / len(progress.returns)
    if progress.successes:
        row["success_rate"] = sum(progress.successes) / len(progress.successes)
    return row


def headline(
    config: EnvironmentSettings, progress: EmbodiedProgress, last: TrainReport | None
) -> Headline:
    """The top line of the live view."""
    rate = progress.env_steps / max(progress.train_seconds, 1e-9) if progress.version else None
    figures = (
        ("steps", f"{progress.env_steps:,}"),
        ("steps/s", figure(rate, ",.0f")),
        ("seconds", f"{progress.train_seconds:.0f}"),
        ("return", figure(_mean(progress.returns), ".2f")),
        ("success", figure(_mean(progress.successes), ".0%")),
        ("staleness", figure(last.lag_mean if last else None, ".1f")),
    )
    run = f"{config.name} (seed {config.seed})"
    return Headline(run, progress.version, config.iterations, figures)


def _mean(values: list[float] | list[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def warn_of_no_success(config: EnvironmentSettings, report: TrainReport, *, warned: bool) -> bool:
    """Warn where there is a target for the success rate, and the environment reports no success.

    It shows with the first episodes that end. Returns whether the run has been warned, now or
    before.
    """
    target = config.evaluation.target_success_rate
    if warned or target is None or report.episode_success or not report.episode_return:
        return warned
    print(
        f"{config.name}: evaluation.target_success_rate is {target}, but {config.env.name} reports "
        "no success (is_success or success in the info of an episode's last step): this target "
        "cannot be judged. Leave it out, or set evaluation.target_return",
        file=sys.stderr,
    )
    return True


def outcome(
    config: EnvironmentSettings, episodes: Sequence[EvaluatedEpisode]
) -> Literal["succeeded", "fell short", "finished"]:
    """How the evaluation stands to the targets; one that cannot be judged is no target."""
    wanted, rate = config.evaluation, success_rate(episodes)
    judged = []
    if wanted.target_success_rate is not None and rate is not None:
        judged.append(rate >= wanted.target_success_rate)
    if wanted.target_return is not None:
        judged.append(mean_return(episodes) >= wanted.target_return)
    if not judged:
        return "finished"
    return "succeeded" if all(judged) else "fell short"


def summarized(
    config: EnvironmentSettings,
    progress: EmbodiedProgress,
    episodes: Sequence[EvaluatedEpisode],
    stopped: Stopped | None,
) -> EmbodiedSummary:
    """What came of a run, as far as all kinds of runs in environments have it."""
    summary = EmbodiedSummary(
        run=config.name,
        outcome=stopped.outcome if stopped else outcome(config, episodes),
        seed=config.seed,
        iterations=progress.version,
        env_steps=progress.env_steps,
        train_seconds=progress.train_seconds,
        error=stopped.error if stopped else None,
    )
    if progress.version:
        summary.steps_per_second = progress.env_steps / max(progress.train_seconds, 1e-9)
        summary.staleness = Staleness(
            mean=progress.lag_mean, max=progress.lag_max, allowed=config.training.max_staleness
        )
    if episodes:
        summary.success_rate = success_rate(episodes)
        summary.return_ = mean_return(episodes)
        summary.evaluation_episodes = len(episodes)
        if summary.success_rate is None and config.evaluation.target_success_rate:
            summary.extra["target_success_rate"] = "not judged: no success was reported"
    return summary


def success_rate(episodes: Sequence[EvaluatedEpisode]) -> float | None:
    """The share of successes; None where the environment reports no success."""
    known = [episode.success for episode in episodes if episode.success is not None]
    return sum(known) / len(known) if known else None


def mean_return(episodes: Sequence[EvaluatedEpisode]) -> float:
    """The mean return of the episodes."""
    return sum(episode.episode_return for episode in episodes) / len(episodes)
