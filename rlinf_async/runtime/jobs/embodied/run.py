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
from collections.abc import Mapping
from typing import Literal

from rlinf_async.channels import Channel, Latest
from rlinf_async.messages.embodied import Collect, TrainReport, Trajectory
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.progress import ProgressView
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import EmbodiedSummary, Staleness
from rlinf_async.runtime.calls import GroupCall
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.group import WorkerGroup
from rlinf_async.runtime.jobs.books import TrainingClock, how_it_ended, restarts_of
from rlinf_async.runtime.jobs.checkpoints import clean
from rlinf_async.runtime.jobs.embodied.collecting import Apart, Collectors, Together
from rlinf_async.runtime.jobs.embodied.config import EmbodiedConfig, reseeded
from rlinf_async.runtime.jobs.embodied.pictures import pictures
from rlinf_async.runtime.jobs.embodied.reached import Parts, Reached, keep, load_reached, noted
from rlinf_async.runtime.jobs.embodied.rows import headline, row
from rlinf_async.runtime.jobs.in_folder import Draw
from rlinf_async.runtime.jobs.live import Headline, Live
from rlinf_async.runtime.jobs.lost import deliveries, ended_by_lost_items
from rlinf_async.workers.actor import EmbodiedFSDPActor, TrainingPlan
from rlinf_async.workers.env import EnvReport, EvaluatedEpisode, EvaluationPlan

Outcome = Literal["succeeded", "fell short", "finished"]


class Graph:
    """The channels between the collectors, the actors and this process."""

    def __init__(self, cluster: Cluster, config: EmbodiedConfig) -> None:
        ahead = config.training.max_staleness + 1
        self.tickets: Channel[Collect] = cluster.channel(
            Collect,
            name="tickets",
            capacity=ahead,
            max_deliveries=deliveries(1, config.cluster.max_restarts),
        )
        self.trajectories: Channel[Trajectory] = cluster.channel(
            Trajectory, name="trajectories", capacity=config.trajectories * ahead
        )
        self.weights: Latest[WeightUpdate] = cluster.latest(WeightUpdate, name="weights")


class EmbodiedRun:
    """Trains, evaluates, and keeps the books."""

    def __init__(self, config: EmbodiedConfig, folder: RunFolder) -> None:
        self.folder = folder
        clean(folder.checkpoints)
        self.reached = load_reached(folder.checkpoints) or Reached()
        self._books: dict[str, bytes] = {}
        """of checkpoints that are being written: what had been reached"""
        self.config = reseeded(config, self.reached.version)
        self.left_out: Mapping[str, int] = {}
        """spans that the trace does not have, by worker"""
        self._env_reports: list[EnvReport] = []
        self._last: TrainReport | None = None

    async def main(self) -> EmbodiedSummary:
        """The whole run."""
        with ProgressView() as view:
            async with self._cluster() as cluster:
                live = Live(self.folder, cluster, view, self._headline)
                self.left_out = live.left_out
                with live, ended_by_lost_items(cluster):
                    try:
                        return await self._run(cluster, live)
                    finally:
                        await live.leave_trace()

    @property
    def title(self) -> str:
        """Of its pictures."""
        return f"{self.config.name}: {self.config.env.name}"

    def drawings(self) -> dict[str, Draw]:
        """The pictures of a run that ended."""
        return pictures(self.config, self.folder, self.title)

    def failed_summary(self, error: BaseException) -> EmbodiedSummary:
        """What is left of a run that did not end by itself."""
        outcome, cause = how_it_ended(error)
        return EmbodiedSummary(
            run=self.config.name,
            outcome=outcome,
            seed=self.config.seed,
            iterations=self.reached.version,
            env_steps=self.reached.env_steps,
            train_seconds=self.reached.train_seconds,
            error=cause,
        )

    def _headline(self) -> Headline:
        return headline(self.config, self.reached, self._last)

    def _cluster(self) -> Cluster:
        return self.config.cluster.make_cluster()

    async def _run(self, cluster: Cluster, live: Live) -> EmbodiedSummary:
        live.note = "starting workers"
        graph = Graph(cluster, self.config)
        apart = self.config.cluster.rollout_workers > 0
        collectors = (Apart if apart else Together)(cluster, self.config, graph)
        actors = await self._launch(cluster, collectors)
        live.note = ""
        with collectors.serving(), self._metrics() as metrics:
            await self._train(graph, collectors, actors, live, metrics)
            live.note = "evaluating"
            episodes = await collectors.evaluate(self._evaluation())
            self._write_evaluation(metrics, episodes)
        await graph.weights.sender.close()
        await collectors.finish()
        return self._summary(cluster, episodes)

    async def _launch(
        self, cluster: Cluster, collectors: Collectors
    ) -> WorkerGroup[EmbodiedFSDPActor]:
        """Start all workers: at the same time where each has a process of its own."""
        if self.config.cluster.backend == "process":
            actors, _ = await asyncio.gather(self._launch_actors(cluster), collectors.launch())
            return actors
        # Threads of one process share torch's random numbers: another policy that is made
        # meanwhile would change the weights that the actor begins with.
        actors = await self._launch_actors(cluster)
        await collectors.launch()
        return actors

    async def _launch_actors(self, cluster: Cluster) -> WorkerGroup[EmbodiedFSDPActor]:
        counts = self.config.cluster
        resume = str(self.folder.checkpoints / self.reached.checkpoint)
        return await cluster.launch(
            EmbodiedFSDPActor,
            self.config.actor,
            resume=resume if self.reached.version else None,
            count=counts.actors,
            name="Actor",
            collective=self.config.collective,
            env_vars=counts.environment,
        )

    async def _train(
        self,
        graph: Graph,
        collectors: Collectors,
        actors: WorkerGroup[EmbodiedFSDPActor],
        live: Live,
        metrics: MetricsWriter,
    ) -> None:
        first, ahead = self.reached.version, self.config.training.max_staleness
        await actors.call(EmbodiedFSDPActor.sync_model_to_rollout, graph.weights.sender)
        collecting = collectors.collect()
        parts = Parts(self.config.cluster.actors)
        clock = TrainingClock(self.reached.train_seconds)
        # A restarted env worker may send a trajectory again when the actors are done already.
        with graph.trajectories.receiver:
            with graph.tickets.sender:
                for iteration in range(first, first + ahead + 1):
                    await self._issue(graph, iteration)
                left = range(first, self.config.iterations)
                calls = (self._train_next(graph, actors) for _ in left)
                training = next(calls, None)
                while training is not None:
                    reports = await training
                    await self._issue(graph, reports[0].version + ahead)
                    training = next(calls, None)  # trains while this process books the iteration
                    for part in reports:
                        if (report := parts.join(part)) is not None:
                            await self._take(report, metrics, live, clock())
            self._env_reports = await collecting

    def _train_next(
        self, graph: Graph, actors: WorkerGroup[EmbodiedFSDPActor]
    ) -> GroupCall[list[TrainReport]]:
        """Let the actors train the next iteration."""
        return actors.call(
            EmbodiedFSDPActor.run_training,
            self._plan(),
            graph.trajectories.receiver,
            graph.weights.sender,
        )

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

    async def _take(
        self, report: TrainReport, metrics: MetricsWriter, live: Live, seconds: float
    ) -> None:
        """Book one iteration."""
        reached, training = self.reached, self.config.training
        reached.take(report, seconds, training.return_window)
        self._last = report
        metrics.write(reached.env_steps, row(reached, report))
        if report.saving is not None:
            self._books[report.saving] = noted(reached, report.saving)
        if report.checkpoint is not None:
            books = self._books.pop(report.checkpoint)
            count = training.keep_checkpoints
            await keep(self.folder.checkpoints, report.checkpoint, books, count)
        live.show()

    def _metrics(self) -> MetricsWriter:
        kept = self.reached.env_steps if self.reached.version else None
        sinks = self.config.training.metrics
        return MetricsWriter(self.folder.path, resume_at=kept, sinks=sinks)

    def _evaluation(self) -> EvaluationPlan:
        return EvaluationPlan(
            episodes=self.config.evaluation.episodes,
            seed=self.config.evaluation.seed,
            min_version=self.config.iterations,
        )

    def _write_evaluation(self, metrics: MetricsWriter, episodes: list[EvaluatedEpisode]) -> None:
        """A row of its own, a step after the last: a resumed run drops it and evaluates again."""
        row = {
            "env_steps": float(self.reached.env_steps),
            "train_seconds": self.reached.train_seconds,
            "eval_return": _mean_return(episodes),
        }
        success_rate = _success_rate(episodes)
        if success_rate is not None:
            row["eval_success_rate"] = success_rate
        metrics.write(self.reached.env_steps + 1, row)

    def _summary(self, cluster: Cluster, episodes: list[EvaluatedEpisode]) -> EmbodiedSummary:
        success_rate, mean_return = _success_rate(episodes), _mean_return(episodes)
        reached = self.reached
        return EmbodiedSummary(
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
            restarts=restarts_of(cluster),
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


def _success_rate(episodes: list[EvaluatedEpisode]) -> float | None:
    """None where the environment does not say what success is."""
    known = [episode.success for episode in episodes if episode.success is not None]
    return sum(known) / len(known) if known else None


def _mean_return(episodes: list[EvaluatedEpisode]) -> float:
    return sum(episode.episode_return for episode in episodes) / len(episodes)
