"""What the runs of all jobs in environments have in common: tickets, step boundaries, what is left.

::

    main --> launch --> train --[ step boundary ]--> evaluate --> the workers end
                         |            |
                         tickets      progress, checkpoint, a row of the metrics

A job launches its own workers and trains its own iterations. Admission: the ticket of iteration
``i`` is issued once version ``i - max_staleness`` is trained, so no step can be more than
``max_staleness`` versions old when it is trained.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from rlinf_async.messages.embodied import Collect, TrainReport
from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import EmbodiedSummary
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.checkpoints import Checkpointer, ShardWriters, clean, load_progress
from rlinf_async.runtime.jobs.config import HostConfig
from rlinf_async.runtime.jobs.embodied.channels import EmbodiedChannels
from rlinf_async.runtime.jobs.embodied.collectors import Collectors
from rlinf_async.runtime.jobs.embodied.drawings import pictures
from rlinf_async.runtime.jobs.embodied.evaluation import evaluate, write_evaluation
from rlinf_async.runtime.jobs.embodied.playing import Trained
from rlinf_async.runtime.jobs.embodied.reports import (
    EmbodiedProgress,
    headline,
    row,
    summarized,
    warning_of_success,
)
from rlinf_async.runtime.jobs.embodied.settings import Settings, reseeded
from rlinf_async.runtime.jobs.failures import Stopped
from rlinf_async.runtime.jobs.run import Draw, TrainingClock
from rlinf_async.runtime.jobs.view import Headline, LiveView
from rlinf_async.runtime.signals import RunSignals, run_signals
from rlinf_async.workers.env import EnvReport, EvaluatedEpisode

ChannelsT = TypeVar("ChannelsT", bound=EmbodiedChannels)
ProgressT = TypeVar("ProgressT", bound=EmbodiedProgress)


class Flow(NamedTuple, Generic[ChannelsT]):
    """What a run trains and evaluates with, besides the workers that train."""

    cluster: Cluster
    channels: ChannelsT
    collectors: Collectors
    view: LiveView


class LoopContext(NamedTuple):
    """What a training loop uses at its step boundaries."""

    clock: TrainingClock
    signals: RunSignals
    checkpointer: Checkpointer
    metrics: MetricsWriter


class EnvironmentRun(ABC, Generic[Settings, ProgressT, ChannelsT]):
    """Trains, evaluates, and accounts for what was trained.

    Args:
        config: fitted to its environment.
        folder: of the run.
        progress: where nothing was trained yet.
        file: that a checkpoint of this job has to contain.
    """

    def __init__(
        self, config: Settings, folder: RunFolder, progress: ProgressT, *, file: str = ""
    ) -> None:
        self.folder = folder
        clean(folder.checkpoints)
        self.progress: ProgressT = (
            load_progress(folder.checkpoints, type(progress), file=file) or progress
        )
        self.config: Settings = reseeded(config, self.progress.version)
        self._env_reports: list[EnvReport] = []
        self._last: TrainReport | None = None
        self._warnings: set[str] = set()
        """those that were printed"""
        self._episodes: list[EvaluatedEpisode] = []
        """episodes of the evaluation"""

    @abstractmethod
    async def main(self, cluster: Cluster, view: LiveView) -> None:
        """The flow, from the first ticket to the evaluation."""

    @property
    @abstractmethod
    def trained(self) -> Trained:
        """What lets the policy of a checkpoint act: for pictures."""

    async def _train_and_evaluate(
        self,
        flow: Flow[ChannelsT],
        writers: ShardWriters,
        train: Callable[[LoopContext], Awaitable[None]],
    ) -> None:
        """Train, evaluate, and wait for the workers that collect to end."""
        flow.view.note = ""
        with flow.collectors.serving(), self._metrics() as metrics:
            kept = self.config.training.keep_checkpoints
            checkpointer = Checkpointer(flow.cluster, writers, self.folder.checkpoints, kept)
            clock = TrainingClock(self.progress.train_seconds)
            await train(LoopContext(clock, run_signals(), checkpointer, metrics))
            self._episodes = await self._evaluate(flow, min_version=self.config.iterations)
            self._warn([episode.success for episode in self._episodes])
            write_evaluation(metrics, self.progress, self._episodes)
        await flow.channels.weights.sender.close()
        await flow.collectors.finish()

    async def _evaluate(self, flow: Flow[ChannelsT], *, min_version: int) -> list[EvaluatedEpisode]:
        """Evaluate weights of at least this version."""
        cluster, channels, collectors, view = flow
        return await evaluate(
            cluster, self.config, channels, collectors, view, min_version=min_version
        )

    # ---- training

    async def _issue_first(self, channels: ChannelsT) -> None:
        """Let the iterations be collected that may be under way before one is trained."""
        first, ahead = self.progress.version, self.config.training.max_staleness
        for iteration in range(first, first + ahead + 1):
            await self._issue(channels, iteration)

    async def _issue(self, channels: ChannelsT, iteration: int) -> None:
        """Let every env worker collect this iteration, if there is one."""
        if iteration >= self.config.iterations:
            return
        ticket = self._ticket(iteration)
        for rank in range(self.config.cluster.env_workers):
            await channels.tickets.sender.put(ticket, key=rank)

    def _ticket(self, iteration: int) -> Collect:
        return Collect(
            iteration=iteration,
            steps=self.config.training.steps_per_iteration // self.config.env.action_chunk,
            min_version=max(0, iteration - self.config.training.max_staleness),
        )

    async def _step_boundary(
        self, channels: ChannelsT, report: TrainReport, loop: LoopContext
    ) -> None:
        """Account for an iteration. Progress and weights are of its version, so a checkpoint can be
        written, and the run can be left."""
        training = self.config.training
        await self._issue(channels, report.version + training.max_staleness)
        self.progress.take(report, loop.clock(), training.return_window)
        if loop.signals.take_checkpoint_request() or self._checkpoint_due(report.version):
            await loop.checkpointer.begin(self.progress)

    def _checkpoint_due(self, version: int) -> bool:
        every = self.config.training.checkpoint_every
        return version == self.config.iterations or (every > 0 and version % every == 0)

    def _write_row(self, report: TrainReport, metrics: MetricsWriter) -> None:
        self._last = report
        self._warn()
        metrics.write(self.progress.env_steps, row(self.progress, report))

    def _warn(self, evaluated: Sequence[bool | None] = ()) -> None:
        """Say once how the environment reports success: in the last episodes, and these."""
        known = [True] if self.progress.success_reports else []
        said = [*known, *self.progress.successes, *evaluated]
        warning = warning_of_success(self.config, said)
        if warning and warning not in self._warnings:
            self._warnings.add(warning)
            print(warning, file=sys.stderr)

    # ---- metrics, pictures, summary

    def _metrics(self) -> MetricsWriter:
        kept = self.progress.env_steps if self.progress.version else None
        sinks = self.config.training.metrics
        return MetricsWriter(self.folder.path, resume_at=kept, sinks=sinks)

    def headline(self) -> Headline:
        """The top line of the live view."""
        return headline(self.config, self.progress, self._last)

    @property
    def title(self) -> str:
        """Title of its pictures."""
        return f"{self.config.name}: {self.config.env.name}"

    @property
    def host(self) -> HostConfig:
        """Where its workers run."""
        return self.config.cluster

    def drawings(self, *, ended: bool) -> dict[str, Draw]:
        """The learning curve, and of a run that came to its end a video of the trained policy."""
        if not (ended or self.progress.version):
            return {}
        made = pictures(self.config, self.folder, self.title, self.headline, self.trained)
        return made if ended else {"learning curve": made["learning curve"]}

    def summary(self, stopped: Stopped | None) -> EmbodiedSummary:
        """What came of the run."""
        summary = summarized(self.config, self.progress, self._episodes, stopped)
        if self.progress.version:
            summary.dropped = {
                "stale answers": sum(report.dropped_answers for report in self._env_reports),
                "second trajectories": self.progress.duplicates,
            }
        return summary
