"""One embodied run, from the first ticket to the evaluation.

::

    tickets ---> env workers ---Observations---> rollout workers ---Actions---> env workers
       ^              |                                 ^
       |              +------Trajectory---> actors -----+  WeightUpdate, through `Latest`
       |                                      |
       +------- this process <--TrainReport---+

                     waits for                          unblocked by
    this process     a report                           the actors
    tickets          version ``v`` for iteration        this process: at most ``max_staleness``
                     ``v + max_staleness``              iterations ahead

Admission: the ticket of iteration ``i`` is issued once version ``i - max_staleness`` is trained, so
no step can be more than ``max_staleness`` versions old when it is trained.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rlinf_async.channels import Channel, Latest
from rlinf_async.messages.embodied import Actions, Collect, Observations, TrainReport, Trajectory
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.progress import ProgressView
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import Staleness, Summary
from rlinf_async.observe.trace import Span
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.group import GroupCall, WorkerGroup
from rlinf_async.runtime.jobs.config import EmbodiedConfig
from rlinf_async.runtime.jobs.live import Live
from rlinf_async.runtime.jobs.progress import Reached, keep, load_reached
from rlinf_async.runtime.supervise import Restart
from rlinf_async.workers.actor import EmbodiedFSDPActor, TrainingPlan
from rlinf_async.workers.env import EnvReport, EnvWorker, EvaluatedEpisode, EvaluationPlan
from rlinf_async.workers.rollout import RolloutReport, RolloutWorker

Outcome = Literal["succeeded", "fell short", "finished"]


class Graph:
    """The channels of a run."""

    def __init__(self, cluster: Cluster, config: EmbodiedConfig) -> None:
        ahead = config.training.max_staleness + 1
        stages = config.env.stages + 1  # one more for the evaluation
        self.tickets: Channel[Collect] = cluster.channel(Collect, name="tickets", capacity=ahead)
        self.observations: Channel[Observations] = cluster.channel(
            Observations, name="observations", capacity=stages * config.cluster.env_workers
        )
        self.actions: Channel[Actions] = cluster.channel(Actions, name="actions", capacity=2)
        self.trajectories: Channel[Trajectory] = cluster.channel(
            Trajectory, name="trajectories", capacity=config.trajectories * ahead
        )
        self.reports: Channel[TrainReport] = cluster.channel(TrainReport, name="reports")
        self.weights: Latest[WeightUpdate] = cluster.latest(WeightUpdate, name="weights")


class EmbodiedRun:
    """Trains, evaluates, and keeps the books."""

    def __init__(self, config: EmbodiedConfig, folder: RunFolder) -> None:
        self.config = config
        self.folder = folder
        self.reached = load_reached(folder.checkpoints) or Reached()
        self.spans: list[Span] = []
        self._env_reports: list[EnvReport] = []

    async def main(self) -> Summary:
        """The whole run."""
        with ProgressView() as view:
            async with self._cluster() as cluster:
                with Live(self.config, self.folder, cluster, self.reached, view) as live:
                    return await self._run(cluster, live)

    def _cluster(self) -> Cluster:
        config = self.config.cluster
        if config.backend == "local":
            return Cluster.local(deadlock_after=config.deadlock_after)
        return Cluster.process(
            heartbeat_limit=config.heartbeat_limit, deadlock_after=config.deadlock_after
        )

    async def _run(self, cluster: Cluster, live: Live) -> Summary:
        live.note = "starting workers"
        graph = Graph(cluster, self.config)
        envs, rollouts, actors = await self._launch(cluster)
        live.note = ""
        with graph.observations.sender, graph.actions.receiver:  # open until the evaluation is done
            serving = rollouts.call(
                RolloutWorker.serve,
                graph.observations.receiver,
                graph.actions.sender,
                graph.weights.receiver,
            )
            await self._train(graph, envs, actors, live)
            live.note = "evaluating"
            episodes = await self._evaluate(graph, envs)
        await self._finish(graph, serving)
        self.spans = live.spans + await cluster.spans()
        live.save_spans(self.spans)
        return self._summary(cluster, episodes)

    async def _launch(
        self, cluster: Cluster
    ) -> tuple[WorkerGroup[EnvWorker], WorkerGroup[RolloutWorker], WorkerGroup[EmbodiedFSDPActor]]:
        config, counts = self.config, self.config.cluster
        env = {"OMP_NUM_THREADS": str(counts.threads)}
        again = Restart(max=counts.max_restarts)
        resume = str(self.folder.checkpoints / self.reached.checkpoint)
        return await asyncio.gather(
            cluster.launch(
                EnvWorker,
                config.env,
                actor_ranks=counts.actors,
                count=counts.env_workers,
                name="Env",
                restart=again,
                env=env,
            ),
            cluster.launch(
                RolloutWorker,
                config.actor.fsdp.policy,
                config.rollout,
                count=counts.rollout_workers,
                name="Rollout",
                restart=again,
                env=env,
            ),
            cluster.launch(
                EmbodiedFSDPActor,
                config.actor,
                resume=resume if self.reached.version else None,
                count=counts.actors,
                name="Actor",
                collective="gloo" if counts.actors > 1 else None,
                env=env,
            ),
        )

    async def _train(
        self,
        graph: Graph,
        envs: WorkerGroup[EnvWorker],
        actors: WorkerGroup[EmbodiedFSDPActor],
        live: Live,
    ) -> None:
        config, first = self.config, self.reached.version
        training = actors.call(
            EmbodiedFSDPActor.run_training,
            self._plan(),
            graph.trajectories.receiver,
            graph.weights.sender,
            graph.reports.sender,
        )
        collecting = envs.call(
            EnvWorker.collect,
            graph.tickets.receiver,
            graph.observations.sender,
            graph.actions.receiver,
            graph.trajectories.sender,
        )
        with graph.tickets.sender, self._metrics() as metrics, self._clock() as clock:
            for iteration in range(first, first + config.training.max_staleness + 1):
                await self._issue(graph, iteration)
            async for report in graph.reports.receiver:
                await self._issue(graph, report.version + config.training.max_staleness)
                self._take(report, metrics, live, clock())
        await training
        self._env_reports = await collecting

    def _plan(self) -> TrainingPlan:
        training = self.config.training
        return TrainingPlan(
            iterations=self.config.iterations,
            trajectories=self.config.trajectories,
            max_staleness=training.max_staleness,
            checkpoint_every=training.checkpoint_every,
            checkpoints=str(self.folder.checkpoints),
        )

    async def _issue(self, graph: Graph, iteration: int) -> None:
        """Let every env worker collect this iteration, if there is one."""
        if iteration >= self.config.iterations:
            return
        ticket = Collect(
            iteration=iteration,
            steps=self.config.training.steps_per_iteration,
            min_version=max(0, iteration - self.config.training.max_staleness),
        )
        for rank in range(self.config.cluster.env_workers):
            await graph.tickets.sender.put(ticket, key=rank)

    def _take(
        self, report: TrainReport, metrics: MetricsWriter, live: Live, seconds: float
    ) -> None:
        """Book one iteration."""
        reached, training = self.reached, self.config.training
        reached.take(report, seconds, training.return_window)
        metrics.write(reached.env_steps, live.row(report))
        if report.checkpoint is not None:
            keep(self.folder.checkpoints, reached, report.checkpoint, training.keep_checkpoints)
        live.show()

    def _metrics(self) -> MetricsWriter:
        kept = self.reached.env_steps if self.reached.version else None
        return MetricsWriter(self.folder.path, resume_at=kept)

    @contextmanager
    def _clock(self) -> Iterator[_Clock]:
        yield _Clock(self.reached.train_seconds)

    async def _evaluate(self, graph: Graph, envs: WorkerGroup[EnvWorker]) -> list[EvaluatedEpisode]:
        plan = EvaluationPlan(
            episodes=self.config.evaluation.episodes,
            seed=self.config.evaluation.seed,
            min_version=self.config.iterations,
        )
        shares = await envs.call(
            EnvWorker.evaluate, plan, graph.observations.sender, graph.actions.receiver
        )
        return [episode for share in shares for episode in share]

    async def _finish(self, graph: Graph, serving: GroupCall[list[RolloutReport]]) -> None:
        await graph.weights.sender.close()
        await serving

    def _summary(self, cluster: Cluster, episodes: list[EvaluatedEpisode]) -> Summary:
        successes = [episode.success for episode in episodes if episode.success is not None]
        success_rate = sum(successes) / len(successes) if successes else None
        mean_return = sum(episode.episode_return for episode in episodes) / len(episodes)
        reached = self.reached
        return Summary(
            run=self.config.name,
            outcome=self._outcome(success_rate, mean_return),
            seed=self.config.seed,
            iterations=reached.version,
            env_steps=reached.env_steps,
            train_seconds=reached.train_seconds,
            steps_per_second=reached.env_steps / max(reached.train_seconds, 1e-9),
            success_rate=success_rate,
            return_=mean_return,
            evaluation_episodes=len(episodes),
            staleness=Staleness(
                mean=reached.lag_mean,
                max=reached.lag_max,
                allowed=self.config.training.max_staleness,
            ),
            restarts={
                supervisor.name: supervisor.restarts
                for group in cluster.groups.values()
                for supervisor in group.supervisors
                if supervisor.restarts
            },
            dropped={
                "stale answers": sum(report.dropped_answers for report in self._env_reports),
                "second trajectories": reached.duplicates,
            },
        )

    def _outcome(self, success_rate: float | None, mean_return: float) -> Outcome:
        wanted = self.config.evaluation
        if wanted.target_success_rate is None and wanted.target_return is None:
            return "finished"
        reached = (
            wanted.target_success_rate is None
            or (success_rate or 0.0) >= wanted.target_success_rate
        ) and (wanted.target_return is None or mean_return >= wanted.target_return)
        return "succeeded" if reached else "fell short"


class _Clock:
    """Seconds of training, those before a resume included."""

    def __init__(self, before: float) -> None:
        self._start = time.monotonic() - before

    def __call__(self) -> float:
        return time.monotonic() - self._start


def failed_summary(config: EmbodiedConfig, reached: Reached, error: BaseException) -> Summary:
    """What is left of a run that did not end by itself."""
    stopped = isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))
    return Summary(
        run=config.name,
        outcome="stopped" if stopped else "failed",
        seed=config.seed,
        iterations=reached.version,
        env_steps=reached.env_steps,
        train_seconds=reached.train_seconds,
        error=None if stopped else f"{type(error).__name__}: {error}",
    )
