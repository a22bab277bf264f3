"""One language run, from the first prompt to the evaluation.

::

    Source --Request--> rollout --Sample--> [inference] --Sample--> reward --ScoredSample-+
      ^                    ^                                                              |
      | admission          | WeightUpdate, through `Latest`                               v
      +--- this process <--+------- actors <-----SampleGroup, by DP rank------------ Collector

                     waits for                                unblocked by
    this process     the iteration to be trained              the actors
    Source           version ``iteration - max_staleness``    this process
    Collector        a scored sample; room for a group        reward workers; the actors
    actors           the groups of their iteration            the Collector

`samples.py` accounts for samples: every admitted sample is trained exactly once, none more than
``max_staleness`` versions late. The flow is the same whatever the placement: roles that share
devices take turns (`roles.py`), others overlap.

The whole flow is `LanguageRun.main`; its loop over iterations is `LanguageRun._train`.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rlinf_async.config import UsageError
from rlinf_async.data import DataState, Prompts
from rlinf_async.messages.language import Prompt, Scored, ScoredSample
from rlinf_async.observe.evaluations import HELD_OUT, Evaluated
from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.samples import SampleWriter
from rlinf_async.observe.summary import LanguageSummary
from rlinf_async.observe.waits import Facts
from rlinf_async.rewards.judging import UnknownVerifier, group_verifiers
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.checkpoints import (
    Checkpointer,
    Stopped,
    clean,
    in_background,
    versions_in,
)
from rlinf_async.runtime.jobs.config import HostConfig
from rlinf_async.runtime.jobs.hooks import after_iteration
from rlinf_async.runtime.jobs.language.acceptance import Acceptance
from rlinf_async.runtime.jobs.language.backends import earlier_versions
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.evaluation import (
    Beside,
    EvaluationSet,
    evaluate,
    verifiers_of,
    warn_of_evaluation,
)
from rlinf_async.runtime.jobs.language.kept import SampleKeeper
from rlinf_async.runtime.jobs.language.model import export
from rlinf_async.runtime.jobs.language.reports import (
    LanguageFacts,
    add,
    draw_curve,
    drawn,
    evaluation_row,
    headline,
    row,
    summary,
    summed_up,
    warn_of_failures,
    warn_of_no_correction,
    warn_of_no_signal,
)
from rlinf_async.runtime.jobs.language.roles import LanguageChannels, Roles, Trained
from rlinf_async.runtime.jobs.language.samples import (
    Collector,
    Dispatcher,
    Gatherer,
    InFlight,
    LanguageProgress,
    Ledger,
    Source,
    Unfinished,
    check_resumed_critic,
    drop_turns,
    gathering,
    in_flight,
    judged_at_once,
    load_language_progress,
    load_unfinished,
    next_prompts,
    with_messages,
)
from rlinf_async.runtime.jobs.run import Draw, TrainingClock
from rlinf_async.runtime.jobs.swapping import changed, read_swaps
from rlinf_async.runtime.jobs.view import Headline, LiveView
from rlinf_async.runtime.signals import run_signals
from rlinf_async.workers.base import BuildError
from rlinf_async.workers.reward import BY_MODEL

if TYPE_CHECKING:  # a run without a scheduler does not load it
    from rlinf_async.runtime.jobs.language.scheduling import SampleNews
    from rlinf_async.workers.scheduler import SchedulerSummary

FLUSH_SECONDS = 5.0
"""seconds that a checkpoint waits for a disk that samples are written to"""
COMPARED_PROMPTS = 4
"""prompts that the engine's and the actor's log-probs are compared on"""


class Flow(NamedTuple):
    """The parts of a run that has started."""

    channels: LanguageChannels
    roles: Roles
    source: Source
    collector: Collector
    gatherer: Gatherer | None
    checkpointer: Checkpointer
    metrics: MetricsWriter
    view: LiveView
    samples: SampleKeeper


def _replace(source: Source, news: SampleNews | None, group: Sequence[ScoredSample]) -> None:
    """Replace a group; the scheduler is told."""
    source.replace(group)
    if news is not None:
        news.replaced(group)


class LanguageRun:
    """Trains, evaluates, and accounts for what was trained.

    Args:
        config: its model is a folder.
        prompts: the run's prompts, opened.
        folder: the run's folder.
        model: the model's folder.
        sets: prompts to evaluate on, the held-out ones included.
    """

    def __init__(
        self,
        config: LanguageConfig,
        prompts: Prompts,
        folder: RunFolder,
        model: Path,
        sets: Sequence[EvaluationSet] = (),
    ) -> None:
        self.config = config
        self.folder = folder
        self.model = model
        clean(folder.checkpoints)
        self.progress = load_language_progress(folder.checkpoints) or LanguageProgress()
        self._prompts = prompts
        self._sets = sets
        self._samples: SampleWriter | None = None
        self._last: dict[str, float] | None = None
        self._scheduled: SchedulerSummary | None = None
        self._roles: Roles | None = None
        self._evaluated: Sequence[Evaluated] = ()
        """results of the evaluation at the end"""
        training = config.training
        # Groups of one have no signal of their own, and none is needed to learn from a teacher.
        self._warned = training.group_size == 1 or config.distils
        self._warned_of_evaluation = False
        self._uncorrected = False
        """warned that ``off_policy`` changes nothing"""
        self._compared = prompts.held_out[:COMPARED_PROMPTS] or _first_of(prompts)
        self._facts = LanguageFacts(config)
        self._earlier = earlier_versions(config, folder.path)
        self._in_flight = InFlight()
        unfinished = None
        if self.progress.version:
            unfinished = load_unfinished(folder.checkpoints, self.progress)
            note = prompts.restore(msgspec.json.decode(unfinished.data, type=DataState))
            if note:
                print(note, file=sys.stderr)
            check_resumed_critic(config, folder.checkpoints / self.progress.checkpoint)
            if config.reward.model:
                unfinished = with_messages(unfinished, prompts.at)
        self._ledger = Ledger(
            prompts=training.prompts,
            group_size=training.group_size,
            max_staleness=training.max_staleness,
            sampling=config.rollout.sampling,
            seed=config.seed,
            state=unfinished.ledger if unfinished else None,
        )
        if unfinished:
            self._in_flight = unfinished.waiting
            self._in_flight.enter(self._ledger)
        swaps = read_swaps(folder.path)
        self._swapped = any("data.verifier" in one.settings for one in swaps)
        self._of_groups = group_verifiers(self.verifiers) | self._earlier_of_groups()
        swapped = config.data.verifier if self._swapped else ""
        self._at_once = judged_at_once(self._of_groups, swapped)
        self._in_flight.inferred += self._ledger.take_back(self._judged_anew)

    async def main(self, cluster: Cluster, view: LiveView) -> None:
        """The flow, from the first prompt to the evaluation."""
        view.note = "starting workers"
        channels = LanguageChannels(cluster, self.config, gathers=bool(self._of_groups))
        roles = Roles(
            cluster,
            self.config,
            channels,
            self.model,
            self._prompts.verifiers,
            of_sets=verifiers_of(self._sets),
            swapped=self._swapped,
            of_groups=self._of_groups,
            earlier=self._earlier,
        )
        self._roles = roles
        accept = self._acceptance()
        source = self._source(channels, replaces=accept is not None)
        dispatcher = self._dispatcher(channels, roles)
        valued = self.config.has_critic and dispatcher is not None
        news = None if roles.scheduling is None else roles.scheduling.news
        collector = Collector(
            self._ledger,
            channels.scored.receiver,
            channels.groups.sender,
            ranks=self.config.data_ranks,
            version=self.progress.version,
            dispatcher=None if valued else dispatcher,
            finished=news.ended if news is not None and self.config.has_episodes else None,
            accept=accept,
            replace=partial(_replace, source, news),
        )
        gatherer = gathering(channels, collector, self._ledger, self._at_once)
        kept = self.config.training.keep_checkpoints
        checkpointer = Checkpointer(cluster, roles.learners, self.folder.checkpoints, kept)
        await roles.launch(self._resume_path())
        await roles.connect()
        keeper = SampleKeeper(self._writer(), self.folder.path, self.model)
        with (
            channels.held_open(),
            view.metrics(self._kept_step) as metrics,
            in_background(cluster, collector.run(), "collector"),
            in_background(cluster, gatherer.run(), "gatherer") if gatherer else nullcontext(),
            in_background(cluster, dispatcher.run(), "dispatcher") if dispatcher else nullcontext(),
            in_background(
                cluster,
                dispatcher.receive(channels.valued.receiver, self.config.data_ranks),
                "groups with values",
            )
            if valued and dispatcher is not None
            else nullcontext(),
        ):
            flow = Flow(
                channels, roles, source, collector, gatherer, checkpointer, metrics, view, keeper
            )
            if not self.progress.version:
                await self._keep_teacher(roles, 0)
            await roles.publish()
            await self._compare_weights(flow)
            if not self.progress.version:
                await self._evaluate_first(flow)
            await self._in_flight.put_back(channels)
            with (
                in_background(cluster, source.run(), "source"),
                checkpointer,
                run_signals().checked_each_step(),
            ):
                await self._train(flow)
                await checkpointer.finish()
            await self._evaluate_last(flow)
            await self._export(flow)
        channels.weights.sender.close()
        self._scheduled = await roles.finish()

    def _source(self, channels: LanguageChannels, *, replaces: bool) -> Source:
        training = self.config.training
        wanted = f"{training.iterations} iterations of {training.prompts} prompts"
        if replaces:
            wanted += f", {self.progress.refused} refused ones beside them so far,"
        return Source(
            self._ledger,
            partial(next_prompts, self._prompts, wanted),
            channels.tasks.sender,
            version=self.progress.version,
            iterations=training.iterations,
            generated=self._in_flight.names,
            replaces=replaces,
        )

    def _acceptance(self) -> Acceptance | None:
        """Who says which groups are trained."""
        training = self.config.training
        if not training.accept:
            return None
        return Acceptance(training.accept, training.accept_part, training.most_extra)

    def _dispatcher(self, channels: LanguageChannels, roles: Roles) -> Dispatcher | None:
        """Who gives groups to actors whose number changes."""
        if roles.scheduling is None:
            return None
        actor, prompts = self.config.actor, self.config.training.prompts
        return Dispatcher(
            channels.to_train.sender,
            roles.scheduling.shares.receiver,
            batch=prompts // actor.global_batches,
            batches=actor.global_batches,
            samples=self.config.iteration_samples,
            again=roles.scheduling.again.receiver if actor.epochs > 1 else None,
            first=None if actor.pipelined else self.progress.version * prompts,
        )

    async def _train(self, flow: Flow) -> None:
        clock = TrainingClock(self.progress.train_seconds)
        signals = run_signals()
        self._facts.begin(flow.source)
        flow.view.training_begins()
        with Beside() as beside:
            await self._evaluate_if_due(flow, beside)  # again, of a resumed run
            for iteration in range(self.progress.version, self.config.training.iterations):
                collected = partial(_collected, flow.collector, iteration, beside)
                trained = await flow.roles.train(iteration, collected)
                version = iteration + 1
                evaluated = await self._end_evaluation(flow, beside)
                await self._keep_teacher(flow.roles, version)
                await flow.roles.publish()
                flow.source.trained(version)
                row = self._account(flow, iteration, trained, clock())
                accounted = clock()
                self._write_row(flow.metrics, evaluated, row)
                await self._call_hook(iteration, row, flow)
                await signals.unless_terminating(self._compare_weights_if_due(flow, version))
                await self._evaluate_if_due(flow, beside)
                # The step boundary: progress, ledger and weights are of this version, so a
                # checkpoint can be written and the loop can be left.
                if signals.take_checkpoint_request() or self._checkpoint_due(version):
                    await self._checkpoint(flow)
                self._facts.apart(clock() - accounted)
                flow.view.show()
                if signals.leaving:
                    await flow.checkpointer.finish()
                    await signals.leave()

    def _account(
        self, flow: Flow, iteration: int, trained: Trained, seconds: float
    ) -> dict[str, float]:
        """Add the iteration to the progress; its row of the metrics."""
        replaced, refused = self._ledger.replaced(iteration), self._ledger.refused(iteration)
        groups = flow.collector.trained(iteration)
        samples = [one for group in groups for one in group]
        step = self.progress.samples + len(samples)
        flow.samples.keep(samples, step=step, iteration=iteration, refused=refused)
        drop_turns(flow.channels, self._ledger.running)
        seen = summed_up(iteration, groups)
        self._facts.trained(groups)
        warn_of_failures(
            self.config.name,
            iteration,
            groups,
            before=self.progress.outcomes,
            agent=self.config.episode.run,
        )
        self._warned = warn_of_no_signal(self.config.name, iteration, trained, warned=self._warned)
        add(self.progress, seen, iteration + 1, seconds)
        self.progress.duplicates += self._ledger.take_duplicates()
        self._last = row(
            self.progress,
            iteration,
            seen,
            trained,
            masks=bool(self.config.actor.loss.masks),
        )
        if self.config.training.accept:
            self.progress.refused += replaced.groups
            self._last |= drawn(groups, replaced)
        self._uncorrected = warn_of_no_correction(
            self.config.name, self._last, warned=self._uncorrected
        )
        return self._last

    @property
    def verifiers(self) -> tuple[str, ...]:
        """Names of the verifiers of its records, and of those of its evaluation sets."""
        return tuple(sorted({*self._prompts.verifiers, *verifiers_of(self._sets)}))

    def _judged_anew(self, scored: ScoredSample) -> bool:
        """Whether a resumed run judges a finished sample of a group that is not whole once more: at
        once with the others, or by a reward model that may be another one now, or none."""
        outcome = scored.outcome
        had_model = isinstance(outcome, Scored) and BY_MODEL in outcome.parts
        has_model = bool(self.config.reward.model)
        return has_model or had_model or self._at_once(scored.sample.request)

    def _earlier_of_groups(self) -> frozenset[str]:
        """Group verifiers of samples that a resumed run has under way, as far as they are there."""
        state, found = self._ledger.state(), frozenset[str]()
        requests = (*state.running, *(one.sample.request for one in state.finished))
        for name in {one.prompt.verifier for one in requests} - set(self.verifiers):
            with suppress(UsageError, UnknownVerifier):
                found |= group_verifiers([name])
        return found

    # ---- swaps

    @property
    def can_swap(self) -> bool:
        """Whether its workers have started, and run."""
        return self._roles is not None and self._roles.connected

    @property
    def iteration(self) -> int:
        """Number of iterations that were trained."""
        return self.progress.version

    @property
    def code(self) -> tuple[str, ...]:
        """Further code of the user's, beside what the configuration names."""
        return self.verifiers

    async def swap(self, role: str, settings: Mapping[str, Any]) -> str:
        """Replace the workers of a role by some under these settings; says how many.

        Raises:
            BuildError: they cannot be replaced in this run.
            WorkerError: a new one could not be started; the old ones go on.
        """
        if self._roles is None:
            raise BuildError("the workers of this run have not started: try again")
        config = changed(self.config, settings)
        replaced = await self._roles.swap(role, config)
        self.config = config
        return replaced

    # ---- checkpoints

    def _checkpoint_due(self, version: int) -> bool:
        training = self.config.training
        every = training.checkpoint_every
        return version == training.iterations or (every > 0 and version % every == 0)

    async def _checkpoint(self, flow: Flow) -> None:
        """Start to write the checkpoint of the present version, whose samples are kept by then."""
        if self._samples is not None:
            await asyncio.to_thread(self._samples.flushed, FLUSH_SECONDS)
        partial_requests = await flow.roles.partial_requests()
        held = [] if flow.gatherer is None else flow.gatherer.held
        unfinished = Unfinished(  # nothing else runs in this process meanwhile
            ledger=self._ledger.state(),
            data=msgspec.json.encode(self._prompts.state()),
            waiting=in_flight(flow.channels, partial_requests, self._ledger.running, held),
        )
        await flow.checkpointer.begin(self.progress, unfinished.files())

    def _resume_path(self) -> Path | None:
        if not self.progress.version:
            return None
        return self.folder.checkpoints / self.progress.checkpoint

    async def _keep_teacher(self, roles: Roles, version: int) -> None:
        """Write a version that is to be a teacher, before it is published; its turn is that of the
        learners. Of the earlier ones those go that no checkpoint needs."""
        earlier = self._earlier
        if earlier is None or earlier.teacher_of(version) != version:
            return
        folder = earlier.path(version)
        folder.parent.mkdir(exist_ok=True)
        await export(roles.learners.export, self.model, folder)
        oldest = min([*versions_in(self.folder.checkpoints).values(), version])
        for path, one in versions_in(folder.parent).items():
            if one < earlier.oldest_needed(oldest):
                await asyncio.to_thread(shutil.rmtree, path)

    # ---- evaluation, comparison of weights, export

    async def _evaluate_first(self, flow: Flow) -> None:
        before = await self._evaluate(flow, 0, step=0)
        for one in before:
            if one.name == HELD_OUT:
                accuracy, reward = one.accuracy, one.reward
                self.progress.eval_accuracy_before = accuracy.value if accuracy else None
                self.progress.eval_reward_before = reward.value if reward else None
        self._write_evaluation(flow.metrics, before, 0)

    async def _evaluate_if_due(self, flow: Flow, beside: Beside) -> None:
        """Begin an evaluation of the present version, where one is due, beside the training of the
        next iteration; with a scheduler, which moves devices meanwhile, it is waited for.

        Of this version exactly: none is published before it is complete.
        """
        version, every = self.progress.version, self.config.evaluation.every
        due = every and version and version % every == 0
        if not due or version == self.config.training.iterations or run_signals().terminating:
            return
        step = self.progress.samples + 1  # a resumed run drops this row, and makes it again
        beside.begin(self._evaluate(flow, version, step=step))
        if flow.roles.scheduling is not None:
            await beside.done()

    async def _end_evaluation(
        self, flow: Flow, beside: Beside
    ) -> tuple[int, dict[str, float]] | None:
        """The step and the row of the evaluation that runs beside, once it is complete; None where
        there is none, or a SIGTERM gives it up."""
        found = await beside.done() if beside.task else ()
        if not found:
            return None
        if flow.roles.scheduling is None:  # else it was waited for between two iterations
            self._facts.apart(beside.waited)
        row = evaluation_row(self.progress, found) | {"eval_wait_seconds": beside.waited}
        beside.forget()
        return self.progress.samples + 1, row

    def _write_row(
        self,
        metrics: MetricsWriter,
        evaluated: tuple[int, dict[str, float]] | None,
        row: dict[str, float],
    ) -> None:
        """The row of an iteration, and before it that of the evaluation beside it: the same one
        where the iteration has a single sample."""
        if evaluated is not None:
            step, columns = evaluated
            if step == self.progress.samples:
                row = columns | row
            else:
                metrics.write(step, columns)
        metrics.write(self.progress.samples, row)

    async def _call_hook(self, iteration: int, row: Mapping[str, float], flow: Flow) -> None:
        config, at = self.config, (iteration, self.config.training.iterations)
        shown = (flow.checkpointer, flow.view)
        await after_iteration(config.hooks, config.name, self.folder, *at, row, *shown)

    async def _evaluate_last(self, flow: Flow) -> None:
        step = self.progress.samples + 1
        self._evaluated = await self._evaluate(flow, self.progress.version, step=step)
        self._write_evaluation(flow.metrics, self._evaluated, step)

    async def _evaluate(self, flow: Flow, version: int, *, step: int) -> Sequence[Evaluated]:
        """Evaluate a version; ``step`` is that of the row of the metrics."""

        def show(done: int, wanted: int) -> None:
            flow.view.note = f"evaluating: {done} of {wanted} answers"

        keep = partial(flow.samples.keep, step=step, iteration=version, evaluation=True)
        try:
            found = await evaluate(
                self._sets,
                version=version,
                seed=self.config.seed,
                requests=flow.channels.tasks.sender,
                collector=flow.collector,
                on_answer=show,
                on_answers=keep,
            )
        finally:
            flow.view.note = ""
        self._warned_of_evaluation = warn_of_evaluation(
            self.config.name, found, self.config.evaluation, warned=self._warned_of_evaluation
        )
        return found

    def _write_evaluation(
        self, metrics: MetricsWriter, found: Sequence[Evaluated], step: int
    ) -> None:
        """A row of its own: a resumed run drops the one after the last iteration."""
        if found:
            metrics.write(step, evaluation_row(self.progress, found))

    async def _compare_weights_if_due(self, flow: Flow, version: int) -> None:
        every = self.config.training.check_weights_every
        if every and version % every == 0:
            await self._compare_weights(flow)

    async def _compare_weights(self, flow: Flow) -> None:
        """Compare the log-probs of every engine with those of the actors."""
        note, flow.view.note = flow.view.note, "comparing weights"
        await flow.roles.check_weights(self._compared, self.progress.version)
        flow.view.note = note

    async def _export(self, flow: Flow) -> None:
        if self.config.training.export and self.config.actor.part.has_weights:
            flow.view.note = "exporting"
            await export(flow.roles.export, self.model, self.folder.trained)
            flow.view.note = ""

    # ---- what is seen of the run

    @property
    def _kept_step(self) -> int | None:
        """Last step of an earlier start that is kept."""
        return self.progress.samples if self.progress.version else None

    def _writer(self) -> SampleWriter:
        """Begin to keep samples; `summary` ends it."""
        path, config = self.folder.path, self.config.samples
        self._samples = SampleWriter(path, config, keep_to=self._kept_step)
        return self._samples

    def headline(self) -> Headline:
        """The top line of the live view."""
        run = f"{self.config.name} (seed {self.config.seed})"
        return headline(run, self.config.training.iterations, self.progress, self._last)

    def facts(self) -> Facts:
        """What was trained since the last time."""
        return self._facts.take()

    @property
    def title(self) -> str:
        """Title of its pictures."""
        return f"{self.config.name}: {self.config.data.name}"

    @property
    def host(self) -> HostConfig:
        """Settings of the host, or hosts, on which the workers run."""
        return self.config.cluster

    def drawings(self, *, ended: bool) -> dict[str, Draw]:
        """The learning curve."""
        if not (ended or self.progress.version):
            return {}
        return {"learning curve": partial(draw_curve, self.config, self.folder, self.title)}

    def summary(self, stopped: Stopped | None) -> LanguageSummary:
        """Return the summary of the run, whose samples are all written by then."""
        found = summary(
            self.config,
            self.progress,
            self._evaluated,
            stopped,
            self._scheduled,
            self._prompts.left_out,
        )
        if self._samples is not None:
            found.dropped |= self._samples.close()
        return found


async def _collected(collector: Collector, iteration: int, beside: Beside) -> None:
    """Wait for the samples of an iteration, and for the evaluation of the version before it: then
    rollout workers may be stopped."""
    await collector.whole(iteration)
    if beside.task:
        await beside.done()


def _first_of(prompts: Prompts) -> list[Prompt]:
    """The next training prompts; they stay to be trained on."""
    state = prompts.state()
    found = list(islice(prompts, COMPARED_PROMPTS))
    prompts.restore(state)
    return found
