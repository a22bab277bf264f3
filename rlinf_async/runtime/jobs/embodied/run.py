"""One embodied run, from the first ticket to the evaluation.

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

Admission: the ticket of iteration ``i`` is issued once version ``i - max_staleness`` is trained, so
no step can be more than ``max_staleness`` versions old when it is trained.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec

from rlinf_async.backends.base import TrainerBackend
from rlinf_async.messages.embodied import Collect, TrainReport
from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import EmbodiedSummary
from rlinf_async.runtime.calls import GroupCall
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.group import WorkerGroup
from rlinf_async.runtime.jobs.checkpoints import Checkpointer, clean, load_progress
from rlinf_async.runtime.jobs.config import HostConfig
from rlinf_async.runtime.jobs.embodied.channels import EmbodiedChannels
from rlinf_async.runtime.jobs.embodied.collectors import Collectors, make_collectors
from rlinf_async.runtime.jobs.embodied.config import EmbodiedConfig, reseeded
from rlinf_async.runtime.jobs.embodied.evaluation import evaluate, write_evaluation
from rlinf_async.runtime.jobs.embodied.recording import record_demonstrations
from rlinf_async.runtime.jobs.embodied.reports import (
    EmbodiedProgress,
    headline,
    merged,
    pictures,
    row,
    success_rate,
    summarized,
    warn_of_no_success,
)
from rlinf_async.runtime.jobs.failures import Stopped
from rlinf_async.runtime.jobs.placement import Plan
from rlinf_async.runtime.jobs.run import Draw, TrainingClock
from rlinf_async.runtime.jobs.view import Headline, LiveView
from rlinf_async.runtime.signals import run_signals
from rlinf_async.workers.actor import EmbodiedFSDPActor, TrainingPlan
from rlinf_async.workers.env import EnvReport, EvaluatedEpisode


class ActorShards:
    """The actors, as the workers that a `Checkpointer` asks to write."""

    def __init__(self, actors: WorkerGroup[EmbodiedFSDPActor]) -> None:
        self._actors = actors

    async def begin_save(self, path: Path) -> None:
        """Start writing a checkpoint; training may go on."""
        await self._actors.call(EmbodiedFSDPActor.begin_checkpoint, str(path))

    async def saved(self, path: Path) -> None:
        """Wait until the checkpoint that was begun is complete."""
        await self._actors.call(EmbodiedFSDPActor.checkpoint_written)


class EmbodiedRun:
    """Trains, evaluates, and accounts for what was trained.

    Args:
        config: fitted to its environment.
        folder: of the run.
    """

    def __init__(self, config: EmbodiedConfig, folder: RunFolder) -> None:
        self.folder = folder
        clean(folder.checkpoints)
        self.progress = load_progress(folder.checkpoints, EmbodiedProgress) or EmbodiedProgress()
        self.config = reseeded(config, self.progress.version)
        self._env_reports: list[EnvReport] = []
        self._last: TrainReport | None = None
        self._warned = False
        self._cloned: dict[str, float] = {}
        """metrics of the cloning, where there was one"""
        self._rate_before: float | None = None
        self._episodes: list[EvaluatedEpisode] = []
        """episodes of the evaluation"""

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
        view.note = ""
        with collectors.serving(), self._metrics() as metrics:
            kept = self.config.training.keep_checkpoints
            writers = ActorShards(actors)
            checkpointer = Checkpointer(cluster, writers, self.folder.checkpoints, kept)
            await self._train(cluster, channels, collectors, actors, checkpointer, metrics, view)
            self._episodes = await evaluate(
                cluster,
                self.config,
                channels,
                collectors,
                view,
                min_version=self.config.iterations,
            )
            write_evaluation(metrics, self.progress, self._episodes)
        await channels.weights.sender.close()
        await collectors.finish()

    def _with_demonstrations(self) -> EmbodiedConfig:
        """Record demonstrations in the run folder; return the configuration that clones them."""
        wanted, folder = self.config.demonstrations, self.folder.path / "demonstrations"
        shutil.rmtree(folder, ignore_errors=True)  # of a start that came to no checkpoint
        record_demonstrations(
            self.config, wanted.policy, folder, episodes=wanted.episodes, seed=wanted.seed
        )
        replace = msgspec.structs.replace
        cloning = replace(self.config.actor.cloning, demonstrations=str(folder))
        return replace(self.config, actor=replace(self.config.actor, cloning=cloning))

    # ---- training

    async def _launch(
        self, cluster: Cluster, collectors: Collectors, plan: Plan
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

    async def _launch_actors(self, cluster: Cluster, plan: Plan) -> WorkerGroup[EmbodiedFSDPActor]:
        counts = self.config.cluster
        device = plan.device("actor", own_process=counts.processes)
        fsdp = msgspec.structs.replace(self.config.actor.fsdp, device=device)
        resume = str(self.folder.checkpoints / self.progress.checkpoint)
        return await cluster.launch(
            EmbodiedFSDPActor,
            msgspec.structs.replace(self.config.actor, fsdp=fsdp),
            resume=resume if self.progress.version else None,
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

    async def _evaluate_before(
        self,
        cluster: Cluster,
        channels: EmbodiedChannels,
        collectors: Collectors,
        view: LiveView,
    ) -> None:
        """Evaluate the policy that the training begins with."""
        episodes = await evaluate(cluster, self.config, channels, collectors, view, min_version=0)
        self._rate_before = success_rate(episodes)
        view.note = ""

    async def _train(
        self,
        cluster: Cluster,
        channels: EmbodiedChannels,
        collectors: Collectors,
        actors: WorkerGroup[EmbodiedFSDPActor],
        checkpointer: Checkpointer,
        metrics: MetricsWriter,
        view: LiveView,
    ) -> None:
        first, ahead = self.progress.version, self.config.training.max_staleness
        if not first and self.config.actor.cloning.demonstrations:
            await self._clone(actors, view)
        await actors.call(EmbodiedFSDPActor.sync_model_to_rollout, channels.weights.sender)
        if not first and self.config.evaluation.before:
            await self._evaluate_before(cluster, channels, collectors, view)
        collecting = collectors.collect()
        clock, signals = TrainingClock(self.progress.train_seconds), run_signals()
        # A restarted env worker may send a trajectory again when the actors are done already.
        with channels.trajectories.receiver, checkpointer, signals.checked_each_step():
            with channels.tickets.sender:
                for iteration in range(first, first + ahead + 1):
                    await self._issue(channels, iteration)
                iterations = range(first, self.config.iterations)
                calls = (self._train_iteration(channels, actors) for _ in iterations)
                training = next(calls, None)
                while training is not None:
                    report = merged(await training)
                    await self._issue(channels, report.version + ahead)
                    self.progress.take(report, clock(), self.config.training.return_window)
                    # The step boundary: progress and weights are of this version, so a checkpoint
                    # can be written and the loop can be left.
                    if signals.take_checkpoint_request() or self._checkpoint_due(report.version):
                        await checkpointer.begin(self.progress)
                    leaving = signals.leaving
                    # The next one is trained while this process accounts for this one.
                    training = None if leaving else next(calls, None)
                    self._write_row(report, metrics)
                    view.show()
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
                trajectories=self.config.trajectories, max_staleness=training.max_staleness
            ),
            channels.trajectories.receiver,
            channels.weights.sender,
        )

    def _checkpoint_due(self, version: int) -> bool:
        every = self.config.training.checkpoint_every
        return version == self.config.iterations or (every > 0 and version % every == 0)

    async def _issue(self, channels: EmbodiedChannels, iteration: int) -> None:
        """Let every env worker collect this iteration, if there is one."""
        if iteration >= self.config.iterations:
            return
        ticket = Collect(
            iteration=iteration,
            steps=self.config.training.steps_per_iteration // self.config.env.action_chunk,
            min_version=max(0, iteration - self.config.training.max_staleness),
        )
        for rank in range(self.config.cluster.env_workers):
            await channels.tickets.sender.put(ticket, key=rank)

    def _write_row(self, report: TrainReport, metrics: MetricsWriter) -> None:
        self._last = report
        self._warned = warn_of_no_success(self.config, report, warned=self._warned)
        metrics.write(self.progress.env_steps, row(self.progress, report))

    # ---- metrics, summary

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
        made = pictures(self.config, self.folder, self.title, self.headline, self._make_trainer)
        return made if ended else {"learning curve": made["learning curve"]}

    def _make_trainer(self) -> TrainerBackend:
        from rlinf_async.backends.registry import load_trainer_backend

        return load_trainer_backend("fsdp")(self.config.actor, 1, 0)

    def summary(self, stopped: Stopped | None) -> EmbodiedSummary:
        """What came of the run."""
        summary = summarized(self.config, self.progress, self._episodes, stopped)
        summary.success_rate_before = self._rate_before
        summary.extra.update({name: f"{value:g}" for name, value in self._cloned.items()})
        if self.progress.version:
            summary.dropped = {
                "stale answers": sum(report.dropped_answers for report in self._env_reports),
                "second trajectories": self.progress.duplicates,
            }
        return summary
