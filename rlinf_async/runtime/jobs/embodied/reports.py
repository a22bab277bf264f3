"""What an embodied run reports: progress, rows of the metrics, the top line of the live view."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from rlinf_async.messages.embodied import TrainReport
from rlinf_async.messages.success import success_rate
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
    successes: list[bool | None] = msgspec.field(default_factory=list)
    """whether they succeeded; None: the environment does not say"""
    success_reports: int = 0
    """episodes of the whole run of which it says so"""

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
        self.success_reports += sum(one is not None for one in report.episode_success)

    @property
    def success_rate(self) -> float | None:
        """Share of the last episodes that succeeded; None where the environment never says."""
        return success_rate(self.successes, reports=self.success_reports > 0)


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
    if progress.success_rate is not None:
        row["success_rate"] = progress.success_rate
        row["success_unreported"] = float(progress.successes.count(None))
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
        ("success", figure(progress.success_rate, ".0%")),
        ("staleness", figure(last.lag_mean if last else None, ".1f")),
    )
    run = f"{config.name} (seed {config.seed})"
    return Headline(run, progress.version, config.iterations, figures)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def warning_of_success(config: EnvironmentSettings, said: Sequence[bool | None]) -> str:
    """What is to be said about an environment that reports success (``said``) of no episode, though
    there is a target for it, or of some episodes only; empty if nothing is."""
    target, env = config.evaluation.target_success_rate, config.env.name
    if None not in said:
        return ""
    if any(one is not None for one in said):
        return (
            f"{config.name}: {env} reports success (True or False as is_success or success in the "
            "info of an episode's last step) of some episodes only: the others count as not "
            "succeeded, and success_unreported in the metrics is their number"
        )
    if target is None:
        return ""
    return (
        f"{config.name}: evaluation.target_success_rate is {target}, but {env} has reported no "
        "success so far (True or False as is_success or success in the info of an episode's last "
        "step): where it never does, the run falls short. Leave the target out, or set "
        "evaluation.target_return"
    )


def outcome(
    config: EnvironmentSettings, rate: float | None, episodes: Sequence[EvaluatedEpisode]
) -> Literal["succeeded", "fell short", "finished"]:
    """How the evaluation stands to the targets: a success that is not reported reaches none."""
    wanted = config.evaluation
    judged = []
    if wanted.target_success_rate is not None:
        judged.append(rate is not None and rate >= wanted.target_success_rate)
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
    rate = evaluated_rate(episodes, progress)
    summary = EmbodiedSummary(
        run=config.name,
        outcome=stopped.outcome if stopped else outcome(config, rate, episodes),
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
        summary.success_rate = rate
        if rate is not None:
            summary.success_unreported = unreported(episodes)
        summary.return_ = mean_return(episodes)
        summary.evaluation_episodes = len(episodes)
        if rate is None and config.evaluation.target_success_rate is not None:
            summary.extra["target_success_rate"] = "not reached: no success was reported"
    return summary


def evaluated_rate(
    episodes: Sequence[EvaluatedEpisode], progress: EmbodiedProgress | None
) -> float | None:
    """The share of successes; None where the environment reports none, in the training neither."""
    reports = progress is not None and progress.success_reports > 0
    return success_rate([episode.success for episode in episodes], reports=reports)


def unreported(episodes: Sequence[EvaluatedEpisode]) -> int:
    """Episodes of which the environment does not say whether they succeeded."""
    return sum(episode.success is None for episode in episodes)


def mean_return(episodes: Sequence[EvaluatedEpisode]) -> float:
    """The mean return of the episodes."""
    return sum(episode.episode_return for episode in episodes) / len(episodes)
