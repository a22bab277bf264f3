"""One run of soft actor-critic, from the first ticket to the evaluation.

::

    tickets ---> env workers (and rollout workers) ---Trajectory---> replay worker
       ^                        ^                                      |       ^
       |                        | WeightUpdate, `Latest`   ReplayBatch |       | BatchRequest
       |                        |                                      v       |
       +---- this process       +------------------------------------ actor ---+

                     waits for                          unblocked by
    this process     Collected, then a report           the replay worker, then the actor
    tickets          version ``v`` for iteration        this process: at most ``max_staleness``
                     ``v + max_staleness``              iterations ahead

An iteration: its trajectories enter the store; the actor takes its gradient steps, for which the
replay worker draws ahead; meanwhile the next iterations are collected. Between two iterations
nothing is drawn and nothing enters the store: a checkpoint of both is of one moment.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from rlinf_async.backends.base import OffPolicyTrainer
from rlinf_async.config import ConfigError
from rlinf_async.messages.embodied import Collect, TrainReport
from rlinf_async.messages.replay import Collected
from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import EmbodiedSummary
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.group import WorkerGroup
from rlinf_async.runtime.jobs.checkpoints import Checkpointer, clean, load_progress, sibling
from rlinf_async.runtime.jobs.config import HostConfig
from rlinf_async.runtime.jobs.embodied.collectors import Collectors, make_collectors
from rlinf_async.runtime.jobs.embodied.config import reseeded_sections
from rlinf_async.runtime.jobs.embodied.evaluation import evaluate, write_evaluation
from rlinf_async.runtime.jobs.embodied.reports import (
    EmbodiedProgress,
    headline,
    pictures,
    row,
    summarized,
    warn_of_no_success,
)
from rlinf_async.runtime.jobs.embodied_sac.channels import SacChannels
from rlinf_async.runtime.jobs.embodied_sac.config import FittedSac
from rlinf_async.runtime.jobs.failures import Stopped
from rlinf_async.runtime.jobs.placement import Plan
from rlinf_async.runtime.jobs.run import Draw, TrainingClock
from rlinf_async.runtime.jobs.view import Headline, LiveView
from rlinf_async.runtime.signals import run_signals
from rlinf_async.runtime.supervise import Never, Restart
from rlinf_async.workers.actor import GradientPlan, SacActor
from rlinf_async.workers.env import EnvReport, EvaluatedEpisode
from rlinf_async.workers.replay import ReplayWorker
from rlinf_async.workers.replay.worker import STATE, ReplayPlan, read_state

REPLAY = "replay"
"""in a checkpoint, and in the run folder"""


class SacProgress(EmbodiedProgress, kw_only=True):
    """How far a run is."""

    updates: int = 0
    """gradient steps"""
    second_batches: int = 0
    """batches that came twice, and were trained once"""


class SacShards:
    """The actor and the replay worker, as the workers that a `Checkpointer` asks to write."""

    def __init__(self, actor: WorkerGroup[SacActor], replay: WorkerGroup[ReplayWorker]) -> None:
        self._actor, self._replay = actor, replay

    async def begin_save(self, path: Path) -> None:
        """Write the store; start writing the weights."""
        await self._replay.call(ReplayWorker.begin_checkpoint, str(sibling(path)))
        await self._actor.call(SacActor.begin_checkpoint, str(path))

    async def saved(self, path: Path) -> None:
        """Wait until the checkpoint that was begun is complete."""
        await self._actor.call(SacActor.checkpoint_written)
        # In its own place only now: the actor's folder is put together before it has a name.
        os.replace(sibling(path), path / REPLAY)


class SacRun:
    """Trains, evaluates, and accounts for what was trained.

    Args:
        fitted: the configuration, fitted to its environment.
        folder: of the run.
    """

    def __init__(self, fitted: FittedSac, folder: RunFolder) -> None:
        self.folder = folder
        clean(folder.checkpoints)
        file = f"{REPLAY}/{STATE}"
        found = load_progress(folder.checkpoints, SacProgress, file=file)
        self.progress = found or SacProgress()
        self.fitted = _reseeded(fitted, self.progress.version)
        self.config = self.fitted.config
        self._store = self._store_folder()
        self._env_reports: list[EnvReport] = []
        self._last: TrainReport | None = None
        self._warned = False
        self._episodes: list[EvaluatedEpisode] = []
        """episodes of the evaluation"""

    def _store_folder(self) -> Path | None:
        """The folder of the store's files; refuses that of another run."""
        replay = self.config.replay
        if replay.storage == "memory":
            return None
        if not replay.folder:
            return self.folder.path / REPLAY
        folder = Path(replay.folder)
        found = read_state(folder / STATE)
        if found is not None and not found.start.startswith(self._owner):
            raise ConfigError(
                f"{folder} holds the replay store of another run ({found.start}): name a folder of "
                "its own",
                path=("replay", "folder"),
            )
        return folder

    @property
    def _owner(self) -> str:
        return f"{self.folder.path.resolve()}, "

    async def main(self, cluster: Cluster, view: LiveView) -> None:
        """The flow, from the first ticket to the evaluation."""
        view.note = "starting workers"
        channels = SacChannels(cluster, self.fitted)
        plan = self.config.plan(cluster.devices)
        collectors = make_collectors(cluster, self.fitted, channels, plan)
        # One after the other where all share a process: they share torch's random numbers, too.
        actor = await self._launch_actor(cluster, plan)
        replay = await self._launch_replay(cluster)
        await collectors.launch()
        view.note = ""
        with collectors.serving(), self._metrics() as metrics:
            kept = self.config.training.keep_checkpoints
            shards = SacShards(actor, replay)
            checkpointer = Checkpointer(cluster, shards, self.folder.checkpoints, kept)
            await self._train(channels, collectors, actor, replay, checkpointer, metrics, view)
            self._episodes = await evaluate(
                cluster,
                self.fitted,
                channels,
                collectors,
                view,
                min_version=self.config.iterations,
            )
            write_evaluation(metrics, self.progress, self._episodes)
        await channels.weights.sender.close()
        await collectors.finish()

    # ---- workers

    @property
    def _resume(self) -> Path | None:
        """The checkpoint to go on from."""
        progress = self.progress
        return self.folder.checkpoints / progress.checkpoint if progress.version else None

    async def _launch_actor(self, cluster: Cluster, plan: Plan) -> WorkerGroup[SacActor]:
        counts = self.config.cluster
        device = plan.device("actor", own_process=counts.processes)
        fsdp = msgspec.structs.replace(self.config.actor.fsdp, device=device)
        resume = self._resume
        return await cluster.launch(
            SacActor,
            msgspec.structs.replace(self.config.actor, fsdp=fsdp),
            self.fitted.acting_policy,
            resume=None if resume is None else str(resume),
            name="Actor",
            collective=plan.collective("actor"),
            **plan.options("actor", counts.environment),
        )

    async def _launch_replay(self, cluster: Cluster) -> WorkerGroup[ReplayWorker]:
        config, policy, resume = self.config, self.fitted.acting_policy, self._resume
        plan = ReplayPlan(
            observation=policy.observation,
            action=policy.action,
            gamma=config.actor.sac.gamma,
            seed=config.replay.seed,
            iterations=config.iterations,
            iteration_steps=config.iteration_steps,
            spare=config.spare,
            folder="" if self._store is None else str(self._store.resolve()),
            start=f"{self._owner}started at {time.time_ns()}",
            resume="" if resume is None else str(resume / REPLAY),
        )
        on_disk = config.replay.storage == "disk"
        return await cluster.launch(
            ReplayWorker,
            config.replay,
            plan,
            name="Replay",
            restart=Restart(max=config.cluster.max_restarts) if on_disk else Never(),
            env_vars=config.cluster.environment,
        )

    # ---- training

    async def _train(
        self,
        channels: SacChannels,
        collectors: Collectors,
        actor: WorkerGroup[SacActor],
        replay: WorkerGroup[ReplayWorker],
        checkpointer: Checkpointer,
        metrics: MetricsWriter,
        view: LiveView,
    ) -> None:
        first, ahead = self.progress.version, self.config.training.max_staleness
        await actor.call(SacActor.sync_model_to_rollout, channels.weights.sender)
        serving = replay.call(
            ReplayWorker.serve,
            channels.trajectories.receiver,
            channels.requests.receiver,
            channels.batches.sender,
        )
        collecting = collectors.collect()
        clock, signals = TrainingClock(self.progress.train_seconds), run_signals()
        with (
            channels.requests.sender,
            channels.batches.receiver,
            checkpointer,
            signals.checked_each_step(),
        ):
            with channels.tickets.sender:
                for iteration in range(first, first + ahead + 1):
                    await self._issue(channels, iteration)
                for iteration in range(first, self.config.iterations):
                    report = await self._train_iteration(channels, actor, replay, iteration)
                    await self._issue(channels, report.version + ahead)
                    self.progress.take(report, clock(), self.config.training.return_window)
                    # The step boundary: store, weights and progress are of this version.
                    if signals.take_checkpoint_request() or self._checkpoint_due(report.version):
                        await checkpointer.begin(self.progress)
                    self._write_row(report, metrics)
                    view.show()
                    if signals.leaving:
                        await checkpointer.finish()
                        await signals.leave()
            await checkpointer.finish()
            self._env_reports = await collecting
        await serving

    async def _train_iteration(
        self,
        channels: SacChannels,
        actor: WorkerGroup[SacActor],
        replay: WorkerGroup[ReplayWorker],
        iteration: int,
    ) -> TrainReport:
        """Let the trajectories into the store, and the actor learn from it."""
        config = self.config
        [collected] = await replay.call(ReplayWorker.collect, iteration, config.trajectories)
        plan = GradientPlan(
            updates=config.updates(iteration),
            prefetch=config.replay.prefetch,
            priorities=config.replay.prioritized,
        )
        [trained] = await actor.call(
            SacActor.run_training,
            plan,
            channels.requests.sender,
            channels.batches.receiver,
            channels.weights.sender,
        )
        self.progress.updates += plan.updates
        self.progress.second_batches += trained.duplicates
        return _report(collected, trained.version, trained.metrics)

    def _checkpoint_due(self, version: int) -> bool:
        every = self.config.training.checkpoint_every
        return version == self.config.iterations or (every > 0 and version % every == 0)

    async def _issue(self, channels: SacChannels, iteration: int) -> None:
        """Let every env worker collect this iteration, if there is one."""
        if iteration >= self.config.iterations:
            return
        ticket = Collect(
            iteration=iteration,
            steps=self.config.training.steps_per_iteration,
            min_version=max(0, iteration - self.config.training.max_staleness),
            transitions=True,
        )
        for rank in range(self.config.cluster.env_workers):
            await channels.tickets.sender.put(ticket, key=rank)

    def _write_row(self, report: TrainReport, metrics: MetricsWriter) -> None:
        self._last = report
        self._warned = warn_of_no_success(self.fitted, report, warned=self._warned)
        metrics.write(self.progress.env_steps, row(self.progress, report))

    # ---- metrics, summary

    def _metrics(self) -> MetricsWriter:
        kept = self.progress.env_steps if self.progress.version else None
        sinks = self.config.training.metrics
        return MetricsWriter(self.folder.path, resume_at=kept, sinks=sinks)

    def headline(self) -> Headline:
        """The top line of the live view."""
        return headline(self.fitted, self.progress, self._last)

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
        made = pictures(self.fitted, self.folder, self.title, self.headline, self._make_trainer)
        return made if ended else {"learning curve": made["learning curve"]}

    def _make_trainer(self) -> OffPolicyTrainer:
        from rlinf_async.backends.registry import load_off_policy_trainer

        return load_off_policy_trainer("sac")(self.config.actor, self.fitted.acting_policy)

    def summary(self, stopped: Stopped | None) -> EmbodiedSummary:
        """What came of the run."""
        summary = summarized(self.fitted, self.progress, self._episodes, stopped)
        if self.progress.version:
            summary.extra["gradient steps"] = self.progress.updates
            summary.dropped = {
                "stale answers": sum(report.dropped_answers for report in self._env_reports),
                "second trajectories": self.progress.duplicates,
                "second batches": self.progress.second_batches,
            }
        return summary


def _reseeded(fitted: FittedSac, version: int) -> FittedSac:
    """The configuration for a start at this version: other episodes than at any other version."""
    env, rollout = reseeded_sections(fitted.env, fitted.rollout, version)
    config = msgspec.structs.replace(fitted.config, env=env, rollout=rollout)
    return msgspec.structs.replace(fitted, config=config)


def _report(collected: Collected, version: int, metrics: dict[str, float]) -> TrainReport:
    """What the iteration came to, in the form that the reports of all jobs take."""
    return TrainReport(
        iteration=collected.iteration,
        version=version,
        metrics={
            **metrics,
            "replay_size": float(collected.size),
            "replay_age_mean": collected.age_mean,
            "replay_age_max": float(collected.age_max),
        },
        env_steps=collected.env_steps,
        lag_mean=collected.lag_mean,
        lag_max=collected.lag_max,
        duplicates=collected.duplicates,
        episode_return=collected.episode_return,
        episode_length=collected.episode_length,
        episode_success=collected.episode_success,
    )
