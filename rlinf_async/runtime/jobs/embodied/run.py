"""A run in environments, from the first ticket to the evaluation: `EnvironmentRun` is what all jobs
have in common, `EmbodiedRun` the one that trains on whole iterations.

::

    tickets ---> env workers ---Observations---> rollout workers ---Actions---> env workers
       ^              |                                 ^
       |              +------Trajectory---> actors -----+  WeightUpdate, through `Latest`
       |                                      |
       +------- this process <--TrainReport---+  of one call for each iteration

                     waits for                          unblocked by
    this process     a report                           the actors
    tickets          version ``v`` for iteration        this process: at most ``max_staleness``
                     ``v + max_staleness``              iterations ahead

::

    main --> launch --> train --[ step boundary ]--> evaluate --> the workers end
                         |            |
                         tickets      progress, checkpoint, a row of the metrics

A job launches its own workers and trains its own iterations. Admission: the ticket of iteration
``i`` is issued once version ``i - max_staleness`` is trained, so no step can be more than
``max_staleness`` versions old when it is trained.
"""

from __future__ import annotations

import asyncio
import math
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

from rlinf_async.backends.base import FirstWeights, TrainerBackend
from rlinf_async.messages.embodied import (
    Collect,
    ControlCounts,
    TrainReport,
    all_counts,
    success_rate,
)
from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.progress import figure
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.samples import KeptSample, SampleWriter
from rlinf_async.observe.summary import EmbodiedSummary, Staleness
from rlinf_async.observe.waits import Facts
from rlinf_async.runtime.calls import GroupCall, WorkerGroup
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.checkpoints import (
    ActorShards,
    Checkpointer,
    RunProgress,
    ShardWriters,
    Stopped,
    clean,
    folder_of,
    in_background,
    load_progress,
)
from rlinf_async.runtime.jobs.config import HostConfig
from rlinf_async.runtime.jobs.embodied.beginning import Beginning
from rlinf_async.runtime.jobs.embodied.collectors import (
    Collectors,
    EmbodiedChannels,
    evaluate,
    make_collectors,
)
from rlinf_async.runtime.jobs.embodied.curriculum import LEVEL_SUCCESS, Climb, columns_of
from rlinf_async.runtime.jobs.embodied.pictures import pictures
from rlinf_async.runtime.jobs.embodied.playing import (
    TrainedPolicy,
    record_for_run,
)
from rlinf_async.runtime.jobs.embodied.settings import (
    EmbodiedConfig,
    EnvironmentSettings,
    Settings,
    reseeded,
)
from rlinf_async.runtime.jobs.hooks import after_iteration
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.runtime.jobs.run import Draw, TrainingClock
from rlinf_async.runtime.jobs.targets import Best, check_targets
from rlinf_async.runtime.jobs.view import Headline, LiveView
from rlinf_async.runtime.signals import RunSignals, run_signals
from rlinf_async.runtime.supervise import Supervisor
from rlinf_async.workers.actor import EmbodiedFSDPActor, TrainingPlan
from rlinf_async.workers.env import EnvReport, EvaluatedEpisode

FLUSH_SECONDS = 5.0
"""seconds that a checkpoint waits for a disk that episodes are written to"""


class EmbodiedProgress(RunProgress, kw_only=True):
    """Progress of an embodied run."""

    env_steps: int = 0
    episodes: int = 0
    returns: list[float] = msgspec.field(default_factory=list)
    """returns of the last episodes"""
    successes: list[bool | None] = msgspec.field(default_factory=list)
    """whether they succeeded; None: the environment does not say"""
    success_reports: int = 0
    """episodes of the whole run of which it says so"""
    failed_episodes: int = 0
    """episodes that ended with the process of their environment, those of evaluations included"""
    climb: Climb = Climb()

    def take(self, report: TrainReport, seconds: float, window: int, failed: int = 0) -> None:
        """Add one iteration, in which so many episodes ended with their environment's process."""
        self.version = report.version
        self.failed_episodes += failed
        self.env_steps += report.env_steps
        self.train_seconds = seconds
        self.episodes += len(report.episode_return)
        self.lag_sum += report.lag_mean
        self.lag_max = max(self.lag_max, report.lag_max)
        self.duplicates += report.duplicates
        if report.episode_level:
            self.climb = self.climb.after(report.episode_level, report.episode_success)
        self.returns = list(deque([*self.returns, *report.episode_return], window))
        self.success_reports += sum(one is not None for one in report.episode_success)
        lost = [False] * failed if self.success_reports else []
        self.successes = list(deque([*self.successes, *lost, *report.episode_success], window))

    @property
    def step(self) -> int:
        """The step under which metrics are written."""
        return self.env_steps

    @property
    def success_rate(self) -> float | None:
        """Share of the last episodes that succeeded; None where the environment never says."""
        return success_rate(self.successes, reports=self.success_reports > 0)


def merged(parts: Sequence[TrainReport]) -> TrainReport:
    """The report of an iteration, from those of all ranks.

    Counts add up; metrics and staleness are means: all shares are equal. Raises `ValueError` where
    a loss has returned other metrics on one rank than on another.
    """
    for one in parts[1:]:
        if differing := sorted(one.metrics.keys() ^ parts[0].metrics.keys()):
            raise ValueError(
                f"the actors have trained iteration {one.iteration} with different metrics: not "
                f"all have {', '.join(differing)}; a loss has to return the same on every rank"
            )
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
        episode_level=[value for one in parts for value in one.episode_level],
        control=all_counts(one.control for one in parts),
    )


def trained_episodes(report: TrainReport, step: int) -> Iterator[KeptSample]:
    """The summaries of the episodes that ended in an iteration, as they are kept."""
    unset: list[int | msgspec.UnsetType] = [msgspec.UNSET] * len(report.episode_return)
    levels = report.episode_level or unset
    each = report.episode_return, report.episode_length, report.episode_success, levels
    for number, (episode_return, length, success, level) in enumerate(zip(*each, strict=True)):
        yield KeptSample(
            name=f"{report.iteration}/{number}",
            kind="training",
            step=step,
            iteration=report.iteration,
            trained=True,
            outcome="scored",
            reward=episode_return,
            size=length,
            success=success,
            level=level,
        )


def evaluated_episodes(
    episodes: Sequence[EvaluatedEpisode], step: int, version: int
) -> Iterator[KeptSample]:
    """The summaries of the episodes of an evaluation, as they are kept."""
    for one in episodes:
        yield KeptSample(
            name=f"{-1 - one.episode}/{version}",
            kind="evaluation",
            step=step,
            iteration=version,
            trained=False,
            outcome="failed" if one.failed else "scored",
            reward=None if one.failed else one.episode_return,
            size=one.length,
            success=False if one.failed else one.success,
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
        "failed_episodes": float(progress.failed_episodes),
        "staleness_mean": report.lag_mean,
        "staleness_max": float(report.lag_max),
        "second_trajectories": float(report.duplicates),
        **(report.control.metrics() if report.control is not None else {}),
        **(progress.climb.columns() if progress.climb.wanted.levels else {}),
    }
    if taken := sorted(row.keys() & report.metrics.keys()):
        raise ValueError(f"a loss returned the metric {taken[0]!r}, which is a column already")
    row |= report.metrics
    if progress.returns:
        row["return"] = sum(progress.returns) / len(progress.returns)
    if progress.success_rate is not None:
        row["success_rate"] = progress.success_rate
        row["success_unreported"] = float(progress.successes.count(None))
    return row


OF_EPISODES = ("return", "success_rate", "success_unreported")
"""columns that are of the last ``training.return_window`` episodes"""
COLUMNS = (
    *("iteration", "version", "env_steps", "train_seconds", "steps_per_second", "episodes"),
    *("failed_episodes", "staleness_mean", "staleness_max", "second_trajectories"),
    *OF_EPISODES,
)
"""columns that the iterations of every run in environments have, at some time"""
AT_THE_END = {
    f"eval_{name}": f"is measured once, at the end of the run: take {instead!r}, of the episodes "
    "in which it is trained"
    for name, instead in (
        ("return", "return"),
        ("success_rate", "success_rate"),
        ("success_unreported", "success_unreported"),
        ("failed_episodes", "failed_episodes"),
    )
}
"""columns that no iteration has, and what to take in their place"""


def judged(progress: EmbodiedProgress, row: dict[str, float], window: int) -> dict[str, float]:
    """The part of a row by which training is judged: nothing of episodes before ``window`` of them
    have ended, since the first few would say little; and of a level's, before the last level is
    full."""
    early: list[str] = [*OF_EPISODES] if len(progress.returns) < window else []
    if progress.climb.wanted.levels and not progress.climb.complete:
        early.append(LEVEL_SUCCESS)
    return {name: value for name, value in row.items() if name not in early}


def check_judged(config: EnvironmentSettings, columns: Sequence[str]) -> None:
    """Raise `ConfigError` where training could not be judged as it is asked for; ``columns`` are
    those of the job, beside `COLUMNS`."""
    training = config.training
    check_targets(
        training.stop_at,
        training.keep_best,
        (
            *COLUMNS,
            *columns,
            *columns_of(config.curriculum),
            *(ControlCounts().metrics() if config.env.control.hz else ()),
        ),
        elsewhere=AT_THE_END,
        iterations=config.iterations,
        checkpoint_every=training.checkpoint_every,
    )


def headline(
    config: EnvironmentSettings, progress: EmbodiedProgress, last: TrainReport | None, failed: int
) -> Headline:
    """The top line of the live view; ``failed`` episodes ended with their environment's process."""
    rate = progress.env_steps / max(progress.train_seconds, 1e-9) if progress.version else None
    most = config.env.max_failures
    figures = (
        ("steps", f"{progress.env_steps:,}"),
        ("steps/s", figure(rate, ",.0f")),
        ("seconds", f"{progress.train_seconds:.0f}"),
        ("return", figure(_mean(progress.returns), ".2f")),
        ("success", figure(progress.success_rate, ".0%")),
        ("staleness", figure(last.lag_mean if last else None, ".1f")),
        *([("failed episodes", f"{failed:,} of {most:,} (env.max_failures)")] if failed else []),
        *([("target", progress.reached.shown)] if config.training.stop_at.metric else []),
    )
    run = f"{config.name} (seed {config.seed})"
    iterations = progress.version if progress.reached.why else config.iterations
    return Headline(run, progress.version, iterations, figures)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def warning_of_success(config: EnvironmentSettings, said: Sequence[bool | None]) -> str:
    """What is to be said about an environment that reports success (``said``) of no episode, though
    there is a target for it, or of some episodes only; empty if nothing is."""
    env = config.env.name
    if None not in said:
        return ""
    if any(one is not None for one in said):
        return (
            f"{config.name}: {env} reports success (True or False as is_success or success in the "
            "info of an episode's last step) of some episodes only: the others count as not "
            "succeeded, and success_unreported in the metrics is their number"
        )
    asked, then = _asks_for_success(config)
    if not asked:
        return ""
    return (
        f"{config.name}: {asked}, but {env} has reported no success so far (True or False as "
        "is_success or success in the info of an episode's last step): where it never does, "
        f"{then}"
    )


def _asks_for_success(config: EnvironmentSettings) -> tuple[str, str]:
    """The setting that needs success to be reported, and what happens where it never is."""
    target, training = config.evaluation.target_success_rate, config.training
    if target is not None:
        return (
            f"evaluation.target_success_rate is {target}",
            "the run falls short. Leave the target out, or set evaluation.target_return",
        )
    if config.curriculum.levels:
        return "curriculum.levels follow the success rate", "the first level never ends"
    for setting, metric, then in (
        ("stop_at", training.stop_at.metric, "the target is never reached"),
        ("keep_best", training.keep_best.metric, "there is no best checkpoint"),
    ):
        if metric in ("success_rate", "success_unreported"):
            return (
                f"training.{setting}.metric is {metric}",
                f"{then}. Take another column, such as 'return'",
            )
    return "", ""


def outcome(
    config: EnvironmentSettings, rate: float | None, episodes: Sequence[EvaluatedEpisode]
) -> Literal["succeeded", "fell short", "finished"]:
    """Return how the evaluation stands to the targets; success not reported reaches none."""
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
    """Return the summary of a run, as far as all kinds of runs in environments have it."""
    rate = evaluated_rate(episodes, progress, config)
    summary = EmbodiedSummary(
        run=config.name,
        outcome=stopped.outcome if stopped else outcome(config, rate, episodes),
        seed=config.seed,
        iterations=progress.version,
        env_steps=progress.env_steps,
        train_seconds=progress.train_seconds,
        error=stopped.error if stopped else None,
        reached=progress.reached.why or None,
    )
    if progress.best.checkpoint:
        best = progress.best
        summary.extra["best"] = f"{best.checkpoint} ({best.wanted.metric} {best.value:.6g})"
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
        summary.evaluation_failed = sum(one.failed for one in episodes)
        if (counts := all_counts(one.control for one in episodes)) is not None:
            summary.extra["evaluation_missed_deadlines"] = (
                f"{counts.missed:,} of {counts.steps:,} steps"
            )
        if rate is None and config.evaluation.target_success_rate is not None:
            summary.extra["target_success_rate"] = "not reached: no success was reported"
    return summary


def evaluated_rate(
    episodes: Sequence[EvaluatedEpisode],
    progress: EmbodiedProgress | None,
    config: EnvironmentSettings,
) -> float | None:
    """The share of successes; None where the environment reports none, in the training neither, if
    it is the same, and no person was there who may have said so in its place."""
    reports = config.evaluation.env is None and _reports(progress, config)
    return success_rate([episode.success for episode in episodes], reports=reports)


def _reports(progress: EmbodiedProgress | None, config: EnvironmentSettings) -> bool:
    """Whether the environment itself has reported success in the training."""
    return progress is not None and progress.success_reports > 0 and not config.asked.person


def unreported(episodes: Sequence[EvaluatedEpisode]) -> int:
    """Episodes of which the environment does not say whether they succeeded."""
    return sum(episode.success is None and not episode.failed for episode in episodes)


def mean_return(episodes: Sequence[EvaluatedEpisode]) -> float:
    """The mean return of the episodes that came to their end; NaN where none did."""
    returns = [one.episode_return for one in episodes if not one.failed]
    return sum(returns) / len(returns) if returns else math.nan


def write_evaluation(
    metrics: MetricsWriter,
    progress: EmbodiedProgress,
    episodes: Sequence[EvaluatedEpisode],
    config: EnvironmentSettings,
) -> None:
    """A row of its own, a step after the last: a resumed run drops it and evaluates again."""
    row = {
        "env_steps": float(progress.env_steps),
        "train_seconds": progress.train_seconds,
        "failed_episodes": float(progress.failed_episodes),
    }
    if not math.isnan(returned := mean_return(episodes)):
        row["eval_return"] = returned
    rate = evaluated_rate(episodes, progress, config)
    if failed := sum(one.failed for one in episodes):
        row["eval_failed_episodes"] = float(failed)
    if rate is not None:
        row["eval_success_rate"] = rate
        row["eval_success_unreported"] = float(unreported(episodes))
    metrics.write(progress.step + 1, row)


ChannelsT = TypeVar("ChannelsT", bound=EmbodiedChannels)
ProgressT = TypeVar("ProgressT", bound=EmbodiedProgress)


class EmbodiedFlow(NamedTuple, Generic[ChannelsT]):
    """Parts of a run that train and evaluate, besides the workers that train."""

    cluster: Cluster
    channels: ChannelsT
    collectors: Collectors
    view: LiveView


class LoopContext(NamedTuple):
    """Means of a training loop at its step boundaries."""

    clock: TrainingClock
    signals: RunSignals
    checkpointer: Checkpointer
    metrics: MetricsWriter


class EnvironmentRun(ABC, Generic[Settings, ProgressT, ChannelsT]):
    """Trains, evaluates, and accounts for what was trained.

    Args:
        config: fitted to its environment.
        folder: the run's folder.
        progress: where nothing was trained yet.
        beginning: weights that it begins with; None: new ones.
        file: file that a checkpoint of this job has to contain.
    """

    def __init__(
        self,
        config: Settings,
        folder: RunFolder,
        progress: ProgressT,
        beginning: Beginning | None = None,
        *,
        file: str = "",
    ) -> None:
        self.folder = folder
        clean(folder.checkpoints)
        self.progress: ProgressT = (
            load_progress(folder.checkpoints, type(progress), file=file) or progress
        )
        self.config: Settings = reseeded(config, self.progress.version)
        self._aim()
        self.beginning = beginning
        self._env_reports: list[EnvReport] = []
        self._last: TrainReport | None = None
        self._warnings: set[str] = set()
        """warnings that were printed"""
        self._before: list[EvaluatedEpisode] = []
        """episodes of the evaluation before the first iteration"""
        self._episodes: list[EvaluatedEpisode] = []
        self._elsewhere: list[EvaluatedEpisode] = []
        """episodes in the environment of the training, where the evaluation has another"""
        """episodes of the evaluation"""
        self._samples: SampleWriter | None = None
        self._iterations = self.config.iterations
        """iterations of the whole run; no more than were trained once the target is reached"""
        if self.progress.reached.why:
            self._iterations = self.progress.version
        self._answers = config.training.steps_per_iteration // config.env.steps_per_answer
        """answers of the policy in an iteration, of each environment"""
        self._failed_before = self.progress.failed_episodes
        """episodes that failed before this start"""
        self._row: dict[str, float] = {}
        """that of the newest iteration"""
        self._env_workers: Sequence[Supervisor] = ()
        """those of this start, once they are there"""

    def _aim(self) -> None:
        """Judge by the settings of this start; say what of the earlier ones is gone."""
        training, progress, name = self.config.training, self.progress, self.config.name
        progress.aim(training.stop_at, training.keep_best)
        progress.climb = progress.climb.under(self.config.curriculum)
        best = progress.best.checkpoint
        if best and not (self.folder.checkpoints / best).is_dir():
            progress.best = Best(wanted=training.keep_best)
            print(
                f"{name}: its best checkpoint so far, {best}, is not there any more: the best is "
                "found anew",
                file=sys.stderr,
            )
        if progress.reached.why and progress.version < self.config.iterations:
            print(
                f"{name}: {progress.reached.why}; training goes on under another "
                "training.stop_at, or without",
                file=sys.stderr,
            )

    @abstractmethod
    async def main(self, cluster: Cluster, view: LiveView) -> None:
        """The flow, from the first ticket to the evaluation."""

    @property
    @abstractmethod
    def trained(self) -> TrainedPolicy:
        """What lets the policy of a checkpoint act, for pictures."""

    async def _train_and_evaluate(
        self,
        flow: EmbodiedFlow[ChannelsT],
        writers: ShardWriters,
        train: Callable[[LoopContext], Awaitable[None]],
    ) -> None:
        """Train, evaluate, and wait for the workers that collect to end."""
        flow.view.note = ""
        kept = self.progress.step if self.progress.version else None
        self._samples = SampleWriter(self.folder.path, self.config.samples, keep_to=kept)
        self._env_workers = flow.collectors.env_workers
        limit = flow.collectors.limit_failures(self._failed_before)
        with (
            flow.collectors.serving(),
            flow.view.metrics(kept) as metrics,
            in_background(flow.cluster, limit, "limit of failures"),
        ):
            kept = self.config.training.keep_checkpoints
            checkpointer = Checkpointer(flow.cluster, writers, self.folder.checkpoints, kept)
            clock = TrainingClock(self.progress.train_seconds)
            await train(LoopContext(clock, run_signals(), checkpointer, metrics))
            if self.config.evaluation.env is not None:
                self._elsewhere = await self._evaluate(flow, self._iterations, judged=False)
            self._episodes = await self._evaluate(flow, self._iterations)
            self._warn([one.success for one in self._episodes if not one.failed])
            write_evaluation(metrics, self.progress, self._episodes, self.config)
        flow.channels.weights.sender.close()
        await flow.collectors.finish()

    async def _evaluate(
        self, flow: EmbodiedFlow[ChannelsT], min_version: int, *, judged: bool = True
    ) -> list[EvaluatedEpisode]:
        """Evaluate weights of at least this version, where evaluations are judged, or else where
        the policy is trained."""
        cluster, channels, collectors, view = flow
        env = self.config.evaluation.env if judged else None
        episodes = await evaluate(
            cluster, self.config, channels, collectors, view, min_version=min_version, env=env
        )
        self.progress.failed_episodes = self._failed_episodes
        if self._samples is not None and judged:
            step = self.progress.step + 1 if min_version else 0
            make = partial(evaluated_episodes, episodes, step, min_version)
            self._samples.put(make, len(episodes))
        return episodes

    async def _evaluate_before(self, flow: EmbodiedFlow[ChannelsT]) -> None:
        """Evaluate the weights with which the run begins, where that is asked for."""
        if not self.progress.version and self.config.evaluation.before:
            self._before = await self._evaluate(flow, 0)
            flow.view.note = ""

    def first_weights(self) -> FirstWeights | None:
        """Weights of another run to begin with, which are named; None: new ones, or those of the
        checkpoint to go on from."""
        if self.beginning is None or self.progress.version:
            return None
        print(f"{self.config.name}: {self.beginning.said}", flush=True)
        return self.beginning.first

    # ---- training

    async def _issue_first(self, channels: ChannelsT) -> None:
        """Let the iterations be collected that may be under way before one is trained."""
        first, ahead = self.progress.version, self.config.training.max_staleness
        for iteration in range(first, first + ahead + 1):
            await self._issue(channels, iteration)

    async def _issue(self, channels: ChannelsT, iteration: int) -> None:
        """Let every env worker collect this iteration, if there is one."""
        if iteration >= self._iterations:
            return
        ticket = self._ticket(iteration)
        for rank in range(self.config.cluster.env_workers):
            await channels.tickets.sender.put(ticket, key=rank)

    def _ticket(self, iteration: int) -> Collect:
        return Collect(
            iteration=iteration,
            steps=self._answers,
            min_version=max(0, iteration - self.config.training.max_staleness),
            level=self.progress.climb.ticket if self.config.curriculum.levels else None,
        )

    async def _step_boundary(
        self, channels: ChannelsT, report: TrainReport, loop: LoopContext
    ) -> None:
        """Account for an iteration. Progress and weights are of its version, so a checkpoint can be
        written, and the run can be left."""
        training, progress = self.config.training, self.progress
        failed = self._failed_episodes - progress.failed_episodes
        progress.take(report, loop.clock(), training.return_window, failed)
        self._row = row(progress, report)
        seen = judged(progress, self._row, training.return_window)
        if training.stop_at.metric:
            progress.reached = progress.reached.judge(report.iteration, seen)
            if progress.reached.why:
                self._iterations = progress.version
        await self._issue(channels, report.version + training.max_staleness)
        if self._samples is not None:
            make = partial(trained_episodes, report, self.progress.step)
            self._samples.put(make, len(report.episode_return))
        if loop.signals.take_checkpoint_request() or self._checkpoint_due(report.version):
            if self._samples is not None:  # those of this version are kept by then
                await asyncio.to_thread(self._samples.flushed, FLUSH_SECONDS)
            if training.keep_best.metric:
                progress.best = progress.best.rank(folder_of(report.version), seen)
            await loop.checkpointer.begin(progress)

    def _checkpoint_due(self, version: int) -> bool:
        every = self.config.training.checkpoint_every
        return version == self._iterations or (every > 0 and version % every == 0)

    def _write_row(self, report: TrainReport, metrics: MetricsWriter) -> None:
        self._last = report
        self._warn()
        self._warn_of_control(report)
        metrics.write(self.progress.step, self._row)

    async def _call_hook(
        self, report: TrainReport, checkpointer: Checkpointer, view: LiveView
    ) -> None:
        config, at = self.config, (report.iteration, self._iterations)
        hooks, made = config.hooks, self._row
        await after_iteration(hooks, config.name, self.folder, *at, made, checkpointer, view)

    def _warn(self, evaluated: Sequence[bool | None] = ()) -> None:
        """Say once how the environment reports success: in the last episodes, and these."""
        known = [True] if self.progress.success_reports else []
        said = [*known, *self.progress.successes, *evaluated]
        warning = warning_of_success(self.config, said)
        if warning and warning not in self._warnings:
            self._warnings.add(warning)
            print(warning, file=sys.stderr)

    def _warn_of_control(self, report: TrainReport) -> None:
        """Say once that a robot in real time has not done what is learnt from."""
        counts = report.control
        if counts is None or not counts.otherwise or "control" in self._warnings:
            return
        self._warnings.add("control")
        print(
            f"{self.config.name}: in iteration {report.iteration} the robot did not do what the "
            f"policy said: {counts.stale_answers} of {counts.answers} answers came too late to be "
            f"executed, and {counts.clipped + counts.refused} of {counts.steps} commands were "
            "clipped or refused (control_... in metrics.csv). They are learnt from as if they had "
            "been executed: make the policy faster, or hz or the limits wider",
            file=sys.stderr,
        )

    # ---- metrics, pictures, summary

    def headline(self) -> Headline:
        """The top line of the live view."""
        return headline(self.config, self.progress, self._last, self._failed_episodes)

    @property
    def _failed_episodes(self) -> int:
        """Episodes that ended with the process of their environment by now."""
        return self._failed_before + sum(one.failed_episodes for one in self._env_workers)

    @property
    def title(self) -> str:
        """Title of its pictures."""
        return f"{self.config.name}: {self.config.env.name}"

    def facts(self) -> Facts:
        """What was trained since the last time, for the records of waits."""
        return Facts(max_staleness=self.config.training.max_staleness)

    @property
    def host(self) -> HostConfig:
        """Settings of the host, or hosts, on which the workers run."""
        return self.config.cluster

    def drawings(self, *, ended: bool) -> dict[str, Draw]:
        """The learning curve, and of a run that came to its end a video of the trained policy."""
        if not (ended or self.progress.version):
            return {}
        made = pictures(self.config, self.folder, self.title, self.headline, self.trained)
        return made if ended else {"learning curve": made["learning curve"]}

    def summary(self, stopped: Stopped | None) -> EmbodiedSummary:
        """Return the summary of the run, whose episodes are all written by then."""
        summary = summarized(self.config, self.progress, self._episodes, stopped)
        if self._elsewhere:
            summary.return_in_training = mean_return(self._elsewhere)
            said = [one.success for one in self._elsewhere]
            summary.success_rate_in_training = success_rate(
                said, reports=_reports(self.progress, self.config)
            )
        summary.failed_episodes = self._failed_episodes
        if self.progress.version:
            summary.dropped = {
                "stale answers": sum(report.dropped_answers for report in self._env_reports),
                "second trajectories": self.progress.duplicates,
            }
        if self._samples is not None:
            summary.dropped |= self._samples.close()
        if self._before:
            summary.success_rate_before = evaluated_rate(self._before, self.progress, self.config)
            summary.return_before = mean_return(self._before)
        if self.beginning is not None:
            summary.extra["began"] = self.beginning.said.removeprefix("begins ")
        return summary


def make_trainer(config: EmbodiedConfig) -> TrainerBackend:
    """Return a trainer that reads a checkpoint, in this process; ``config`` is fitted to its
    environment."""
    from rlinf_async.backends.parts import DEFAULT_TRAINER, trainers

    return trainers.load(DEFAULT_TRAINER).make(config.actor, 1, 0)


class EmbodiedRun(EnvironmentRun[EmbodiedConfig, EmbodiedProgress, EmbodiedChannels]):
    """A run of PPO; see `EnvironmentRun`.

    Args:
        config: fitted to its environment.
        folder: the run's folder.
        beginning: weights that it begins with; None: new ones.
    """

    def __init__(
        self, config: EmbodiedConfig, folder: RunFolder, beginning: Beginning | None = None
    ) -> None:
        super().__init__(config, folder, EmbodiedProgress(), beginning)
        self._cloned: dict[str, float] = {}
        """metrics of the cloning, where there was one"""

    async def main(self, cluster: Cluster, view: LiveView) -> None:
        """The flow, from the first ticket to the evaluation."""
        view.note = "starting workers"
        if self.config.demonstrations.policy and not self.progress.version:
            view.note = "recording demonstrations"
            self.config = await asyncio.to_thread(self._with_demonstrations)
        channels = EmbodiedChannels(cluster, self.config)
        plan = self.config.plan(cluster.devices)
        collectors = make_collectors(cluster, self.config, channels, plan)
        actors = await self._launch(cluster, collectors, plan)
        flow = EmbodiedFlow(cluster, channels, collectors, view)
        train = partial(self._train, flow, actors)
        await self._train_and_evaluate(flow, ActorShards(actors), train)

    def _with_demonstrations(self) -> EmbodiedConfig:
        """Record demonstrations in the run folder; return the configuration that clones them."""
        folder = record_for_run(self.config, self.config.demonstrations, self.folder.path)
        replace = msgspec.structs.replace
        cloning = replace(self.config.actor.cloning, demonstrations=str(folder))
        return replace(self.config, actor=replace(self.config.actor, cloning=cloning))

    # ---- training

    async def _launch(
        self, cluster: Cluster, collectors: Collectors, plan: PlacementPlan
    ) -> WorkerGroup[EmbodiedFSDPActor]:
        """Start all workers: at the same time where each has its own process."""
        if self.config.cluster.processes:
            actors, _ = await asyncio.gather(
                self._launch_actors(cluster, plan), collectors.launch()
            )
            return actors
        # Threads of one process share torch's random numbers: another policy that is made
        # meanwhile would change the weights that the actor begins with.
        actors = await self._launch_actors(cluster, plan)
        await collectors.launch()
        return actors

    async def _launch_actors(
        self, cluster: Cluster, plan: PlacementPlan
    ) -> WorkerGroup[EmbodiedFSDPActor]:
        counts = self.config.cluster
        device = plan.device("actor", own_process=counts.processes)
        fsdp = msgspec.structs.replace(self.config.actor.fsdp, device=device)
        resume = str(self.folder.checkpoints / self.progress.checkpoint)
        return await cluster.launch(
            EmbodiedFSDPActor,
            msgspec.structs.replace(self.config.actor, fsdp=fsdp),
            resume=resume if self.progress.version else None,
            first=self.first_weights(),
            count=counts.actors,
            name="Actor",
            collective=plan.collective("actor"),
            **plan.options("actor", counts.environment),
        )

    async def _clone(self, actors: WorkerGroup[EmbodiedFSDPActor], view: LiveView) -> None:
        """Let the actors learn from demonstrations."""
        cloning = self.config.actor.cloning
        view.note = f"cloning {cloning.demonstrations}: {cloning.steps} optimizer steps"
        learnt = await actors.call(EmbodiedFSDPActor.clone)
        self._cloned = learnt[0]
        view.note = ""

    async def _train(
        self,
        flow: EmbodiedFlow[EmbodiedChannels],
        actors: WorkerGroup[EmbodiedFSDPActor],
        loop: LoopContext,
    ) -> None:
        channels, first = flow.channels, self.progress.version
        train = partial(self._train_iteration, channels, actors)
        if not first and self.config.actor.cloning.demonstrations:
            await self._clone(actors, flow.view)
        await actors.call(EmbodiedFSDPActor.sync_model_to_rollout, channels.weights.sender)
        await self._evaluate_before(flow)
        collecting = flow.collectors.collect()
        loop.clock.start()
        flow.view.training_begins()
        checkpointer, signals = loop.checkpointer, loop.signals
        # A restarted env worker may send a trajectory again when the actors are done already.
        with channels.trajectories.receiver, checkpointer, signals.checked_each_step():
            with channels.tickets.sender:
                # The actors wait before there is anything to train.
                training = train() if first < self._iterations else None
                await self._issue_first(channels)
                while training is not None:
                    report = merged(await training)
                    await self._step_boundary(channels, report, loop)
                    leaving = signals.leaving
                    ends = leaving or report.version >= self._iterations
                    # The next one is trained while this process accounts for this one.
                    training = None if ends else train()
                    self._write_row(report, loop.metrics)
                    await self._call_hook(report, checkpointer, flow.view)
                    flow.view.show()
                    if leaving:
                        await checkpointer.finish()
                        await signals.leave()
            await checkpointer.finish()
            self._env_reports = await collecting

    def _train_iteration(
        self, channels: EmbodiedChannels, actors: WorkerGroup[EmbodiedFSDPActor]
    ) -> GroupCall[list[TrainReport]]:
        """Let the actors train the next iteration."""
        training = self.config.training
        return actors.call(
            EmbodiedFSDPActor.run_training,
            TrainingPlan(
                trajectories=self.config.trajectories,
                epochs=training.rollout_epochs,
                max_staleness=training.max_staleness,
            ),
            channels.trajectories.receiver,
            channels.weights.sender,
        )

    def _ticket(self, iteration: int) -> Collect:
        epochs = self.config.training.rollout_epochs
        return msgspec.structs.replace(super()._ticket(iteration), epochs=epochs)

    def facts(self) -> Facts:
        """What was trained since the last time, for the records of waits."""
        training, env = self.config.training, self.config.env
        return Facts(
            kind="embodied",
            samples=self.config.trajectories,
            max_staleness=training.max_staleness,
            steps=training.rollout_epochs * training.steps_per_iteration // env.steps_per_answer,
            stages=env.stages,
        )

    # ---- pictures, summary

    @property
    def trained(self) -> TrainedPolicy:
        """What lets the policy of a checkpoint act, for pictures."""
        return TrainedPolicy(self.config, partial(make_trainer, self.config))

    def summary(self, stopped: Stopped | None) -> EmbodiedSummary:
        """Return the summary of the run."""
        summary = super().summary(stopped)
        summary.extra.update({name: f"{value:g}" for name, value in self._cloned.items()})
        return summary
