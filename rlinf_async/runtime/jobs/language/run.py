"""One language run, from the first prompt to the evaluation.

::

    source --Request--> rollout --Sample--> [inference] --Sample--> reward --ScoredSample-+
      ^                    ^                                                              |
      | admission          | WeightUpdate, through `Latest`                               v
      +--- this process <--+------- actors <-----SampleGroup, by DP rank------------ collector

                     waits for                                unblocked by
    this process     the iteration to be trained              the actors
    source           version ``iteration - max_staleness``    this process
    collector        a scored sample; room for a group        reward workers; the actors
    actors           the groups of their iteration            the collector

`ledger.py` keeps the books: every admitted sample is trained exactly once, none more than
``max_staleness`` versions late. The graph is the same whatever the placement: workers that share
devices take turns (`stations.py`), others overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec

from rlinf_async.data import DataState, Prompts
from rlinf_async.messages.language import Prompt
from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.progress import ProgressView
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import LanguageSummary
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.books import TrainingClock, restarts_of
from rlinf_async.runtime.jobs.checkpoints import clean
from rlinf_async.runtime.jobs.in_folder import Draw
from rlinf_async.runtime.jobs.language.collector import Collector
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.evaluation import Evaluated, evaluate
from rlinf_async.runtime.jobs.language.failures import (
    beside,
    look_at_failures,
    look_at_signal,
)
from rlinf_async.runtime.jobs.language.fits import check_unfinished
from rlinf_async.runtime.jobs.language.graph import Graph
from rlinf_async.runtime.jobs.language.learners import check_resumed_critic
from rlinf_async.runtime.jobs.language.ledger import Ledger
from rlinf_async.runtime.jobs.language.reached import (
    Reached,
    Unfinished,
    load_reached,
    load_unfinished,
)
from rlinf_async.runtime.jobs.language.results import draw_curve, failed_summary, summary
from rlinf_async.runtime.jobs.language.rows import book, evaluation_row, headline, look, row
from rlinf_async.runtime.jobs.language.saving import Saving
from rlinf_async.runtime.jobs.language.source import Source, next_prompts
from rlinf_async.runtime.jobs.language.stations import Stations
from rlinf_async.runtime.jobs.language.trained import export
from rlinf_async.runtime.jobs.language.under_way import Waiting, put_back, waiting
from rlinf_async.runtime.jobs.live import Headline, Live
from rlinf_async.runtime.jobs.lost import ended_by_lost_items


class LanguageRun:
    """Trains, evaluates, and keeps the books.

    Args:
        config: fitted: its model is a folder.
        prompts: of the run, opened.
        folder: of the run.
        model: the model's folder.
    """

    def __init__(
        self, config: LanguageConfig, prompts: Prompts, folder: RunFolder, model: Path
    ) -> None:
        self.config = config
        self.folder = folder
        self.model = model
        clean(folder.checkpoints)
        self.reached = load_reached(folder.checkpoints) or Reached()
        self.left_out: Mapping[str, int] = {}
        """spans that the trace does not have, by worker"""
        self._prompts = prompts
        self._last: dict[str, float] | None = None
        self._told = config.training.group_size == 1  # groups of one have no signal of their own
        self._waiting = Waiting()
        unfinished = None
        if self.reached.version:
            unfinished = load_unfinished(folder.checkpoints, self.reached)
            prompts.restore(msgspec.json.decode(unfinished.data, type=DataState))
            check_unfinished(unfinished.ledger, config.training)
            check_resumed_critic(config, folder.checkpoints / self.reached.checkpoint)
        training = config.training
        self._ledger = Ledger(
            prompts=training.prompts,
            group_size=training.group_size,
            max_staleness=training.max_staleness,
            sampling=config.rollout.sampling,
            seed=config.seed,
            state=unfinished.ledger if unfinished else None,
        )
        if unfinished:
            self._waiting = unfinished.waiting
            self._waiting.book(self._ledger)

    async def main(self) -> LanguageSummary:
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
        return f"{self.config.name}: {self.config.data.name}"

    def drawings(self) -> dict[str, Draw]:
        """The pictures of a run that ended."""
        return {"learning curve": partial(draw_curve, self.config, self.folder, self.title)}

    def failed_summary(self, error: BaseException) -> LanguageSummary:
        """What is left of a run that did not end by itself."""
        return failed_summary(self.config, self.reached, error)

    def _headline(self) -> Headline:
        run = f"{self.config.name} (seed {self.config.seed})"
        return headline(run, self.config.training.iterations, self.reached, self._last)

    def _cluster(self) -> Cluster:
        return self.config.cluster.make_cluster()

    async def _run(self, cluster: Cluster, live: Live) -> LanguageSummary:
        live.note = "starting workers"
        graph = Graph(cluster, self.config)
        stations = Stations(cluster, self.config, graph, self.model, self._prompts.verifiers)
        await stations.launch(self._resume_path())
        stations.start()
        source = Source(
            self._ledger,
            partial(next_prompts, self._prompts, self.config.training.iterations),
            graph.requests.sender,
            version=self.reached.version,
            iterations=self.config.training.iterations,
            generated=self._waiting.names,
        )
        collector = Collector(
            self._ledger,
            graph.scored.receiver,
            graph.groups.sender,
            ranks=self.config.cluster.actors,
            version=self.reached.version,
        )
        with self._held_open(graph), self._metrics() as metrics:
            collecting = beside(cluster, collector.run(), "collector")
            try:
                found = await self._from_start_to_end(
                    cluster, graph, stations, source, collector, live, metrics
                )
            finally:
                collecting.cancel()
        await graph.weights.sender.close()
        await stations.finish()
        return summary(self.config, self.reached, found, restarts_of(cluster))

    @contextmanager
    def _held_open(self, graph: Graph) -> Iterator[None]:
        """This process's own ends, which stay open between two calls."""
        with ExitStack() as ends:
            ends.enter_context(graph.scored.receiver)
            ends.enter_context(graph.groups.sender)
            ends.enter_context(graph.groups.receiver)
            ends.enter_context(graph.to_train.receiver)  # the same where there is no critic
            ends.enter_context(graph.to_train.sender)
            with graph.requests.sender:
                yield

    async def _from_start_to_end(
        self,
        cluster: Cluster,
        graph: Graph,
        stations: Stations,
        source: Source,
        collector: Collector,
        live: Live,
        metrics: MetricsWriter,
    ) -> Evaluated | None:
        await stations.publish()
        live.note = "comparing weights"
        await stations.check_weights(self._held_out(4), self.reached.version)
        if not self.reached.version:
            live.note = "evaluating"
            before = await self._evaluate(graph, collector, 0)
            self.reached.eval_accuracy_before = before.accuracy if before else None
            self._write_evaluation(metrics, before, 0)
        live.note = ""
        await put_back(graph, self._waiting)
        admitting = beside(cluster, source.run(), "source")
        keep = self.config.training.keep_checkpoints
        saving = Saving(cluster, stations.learners, self.folder.checkpoints, keep)
        try:
            await self._train(stations, graph, source, collector, saving, live, metrics)
            await saving.finish()
        finally:
            admitting.cancel()
            saving.cancel()
        live.note = "evaluating"
        found = await self._evaluate(graph, collector, self.reached.version)
        self._write_evaluation(metrics, found, self.reached.samples + 1)
        if self.config.training.export and self.config.actor.backend != "toy":
            live.note = "exporting"
            await export(stations.export, self.model, self.folder.trained)
        live.note = ""
        return found

    async def _train(
        self,
        stations: Stations,
        graph: Graph,
        source: Source,
        collector: Collector,
        saving: Saving,
        live: Live,
        metrics: MetricsWriter,
    ) -> None:
        clock = TrainingClock(self.reached.train_seconds)
        every = self.config.training.check_weights_every
        for iteration in range(self.reached.version, self.config.training.iterations):
            trained = await stations.train(iteration, partial(collector.whole, iteration))
            version = iteration + 1
            await stations.publish()
            source.trained(version)
            groups = collector.trained(iteration)
            seen = look(iteration, groups)
            told = bool(self.reached.outcomes.get("failed"))
            look_at_failures(self.config.name, iteration, groups, told=told)
            self._told = look_at_signal(self.config.name, iteration, trained, told=self._told)
            book(self.reached, seen, version, clock())
            self.reached.duplicates += self._ledger.take_duplicates()
            self._last = row(self.reached, iteration, seen, trained)
            self._last |= await self._evaluated_at(version, graph, collector, live)
            metrics.write(self.reached.samples, self._last)
            if every and version % every == 0:
                await stations.check_weights(self._held_out(4), version)
            await self._checkpoint(stations, graph, saving, version)
            live.show()

    async def _evaluated_at(
        self, version: int, graph: Graph, collector: Collector, live: Live
    ) -> dict[str, float]:
        """What the row of this version says of an evaluation, where one is due.

        Of this version exactly: none is published before the next iteration is trained.
        """
        every = self.config.evaluation.every
        if not every or version % every or version == self.config.training.iterations:
            return {}
        live.note = "evaluating"
        found = await self._evaluate(graph, collector, version)
        live.note = ""
        if found is None or found.accuracy is None:
            return {}
        return {"eval_accuracy": found.accuracy}

    async def _checkpoint(
        self, stations: Stations, graph: Graph, saving: Saving, version: int
    ) -> None:
        training = self.config.training
        due = training.checkpoint_every and version % training.checkpoint_every == 0
        if not (due or version == training.iterations):
            return
        begun = await stations.under_way()
        unfinished = Unfinished(  # nothing else runs in this process meanwhile
            ledger=self._ledger.state(),
            data=msgspec.json.encode(self._prompts.state()),
            waiting=waiting(graph, begun, self._ledger.running),
        )
        await saving.begin(self.reached, unfinished)

    def _resume_path(self) -> Path | None:
        if not self.reached.version:
            return None
        return self.folder.checkpoints / self.reached.checkpoint

    def _held_out(self, count: int) -> list[Prompt]:
        """Held-out prompts; prompts of the data where none are held out."""
        return self._prompts.held_out[:count]

    async def _evaluate(self, graph: Graph, collector: Collector, version: int) -> Evaluated | None:
        return await evaluate(
            self._held_out(self.config.evaluation.samples),
            self.config.rollout.sampling.max_tokens,
            version=version,
            requests=graph.requests.sender,
            collector=collector,
        )

    def _metrics(self) -> MetricsWriter:
        kept = self.reached.samples if self.reached.version else None
        sinks = self.config.training.metrics
        return MetricsWriter(self.folder.path, resume_at=kept, sinks=sinks)

    def _write_evaluation(self, metrics: MetricsWriter, found: Evaluated | None, step: int) -> None:
        """A row of its own: a resumed run drops the one after the last iteration."""
        if found is not None and found.accuracy is not None:
            metrics.write(step, evaluation_row(self.reached, found.accuracy))
