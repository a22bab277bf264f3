"""One run that learns from examples, from the first step to the exported model.

::

    records of a step --SampleGroup, by data rank--> actors --report--> row of the metrics
      this process                                     |
         ^             <--log-probs of held-out ones --+    every so many steps
         +-- log-probs of a teacher, one step ahead -- inference workers, where there is one

                     waits for                             unblocked by
    this process     a report; log-probs                   the actors; inference workers
    actors           the groups of their step              this process, which has put them before

A record is one `SampleGroup`: its examples stay on one rank and in one micro-batch. Which records
make a step is a function of the data, so a checkpoint is the weights and the number of the step;
reference log-probs lie in the run's folder from before the first step on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, cast

import msgspec

from rlinf_async.channels import Channel
from rlinf_async.config.registry import load_entry_point
from rlinf_async.data.examples import Examples
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import (
    Example,
    LanguageTrainReport,
    SampleGroup,
    TeacherLogProbs,
)
from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.pictures import SUPERVISED, draw_learning_curve
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import SupervisedSummary
from rlinf_async.runtime.calls import WorkerGroup
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.checkpoints import (
    ActorShards,
    Checkpointer,
    RunProgress,
    Stopped,
    clean,
    load_progress,
)
from rlinf_async.runtime.jobs.config import HostConfig
from rlinf_async.runtime.jobs.language.backends import (
    has_weights,
    inference_backend,
    teacher_of,
    trainer_environment,
    vocabulary_of,
)
from rlinf_async.runtime.jobs.language.model import export
from rlinf_async.runtime.jobs.placement import PlacementPlan, Role, make_plan
from rlinf_async.runtime.jobs.run import Draw, TrainingClock
from rlinf_async.runtime.jobs.supervised.config import SupervisedConfig
from rlinf_async.runtime.jobs.supervised.measures import (
    load_references,
    log_probs,
    measured,
    save_references,
)
from rlinf_async.runtime.jobs.supervised.teaching import Teaching
from rlinf_async.runtime.jobs.view import Headline, LiveView
from rlinf_async.runtime.signals import run_signals
from rlinf_async.workers.actor import LanguageActor
from rlinf_async.workers.base import Device
from rlinf_async.workers.inference import InferenceConfig, InferenceWorker, TeacherQuestions

REFERENCE: Final = "reference.npz"
"""file of the log-probs under the first weights, in the run's folder"""
REPORTED: Final = (
    *("loss", "grad_norm", "lr", "skipped", "entropy", "micro_batches"),
    *("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"),
    *("teacher_divergence", "teacher_mass"),
)
"""columns that are taken from the actors' reports, where these have them"""


class SupervisedProgress(RunProgress, kw_only=True):
    """Progress of a run; its version is the number of steps."""

    examples: int = 0
    """records that were learnt from"""
    tokens: int = 0
    loss: float | None = None
    before: dict[str, float] = msgspec.field(default_factory=dict)
    """what was measured on held-out records before the first step"""
    after: dict[str, float] = msgspec.field(default_factory=dict)
    """the same, by the last evaluation"""


class Actors(ActorShards):
    """The actors, which also leave the model."""

    async def export(self, path: Path) -> None:
        """Write the model as a Hugging Face folder, without its tokenizer."""
        await self.group.call(LanguageActor.save_pretrained, str(path))


class Flow(NamedTuple):
    """The parts of a run that has started."""

    actors: Actors
    groups: Channel[SampleGroup]
    checkpointer: Checkpointer
    metrics: MetricsWriter
    view: LiveView
    teaching: Teaching | None = None


def plan_actors(config: SupervisedConfig, devices: Sequence[Device]) -> PlacementPlan:
    """The devices of every worker.

    Raises:
        ConfigError: a setting of the placement is wrong.
        MissingDevice: there are too few devices.
    """
    count = config.cluster.actors
    if count is None and all(one.kind == "cpu" for one in devices):
        count = config.actor.model_ranks
    roles = [
        Role(
            name="actor",
            count=count,
            asked=config.cluster.placement.actor,
            one_device=True,
            fits=config.fits_actors,
        ),
        Role(
            name="inference",
            count=config.inference_workers,
            asked=config.inference_placement,
            one_device=True,
        ),
    ]
    return make_plan(roles, devices, node_groups=config.cluster.node_groups)


class SupervisedRun:
    """Trains, measures, exports.

    Args:
        config: the run's configuration, with its number of actors.
        examples: the run's examples.
        folder: the run's folder.
        model: the model's folder.
    """

    def __init__(
        self, config: SupervisedConfig, examples: Examples, folder: RunFolder, model: Path
    ) -> None:
        self.config = config
        self.folder = folder
        self.model = model
        clean(folder.checkpoints)
        found = load_progress(folder.checkpoints, SupervisedProgress)
        self.progress = found or SupervisedProgress()
        self._examples = examples
        training = config.training
        self.steps = training.steps or examples.steps(training.epochs or 1, training.batch_size)
        """number of steps of the whole run"""
        self._last: dict[str, float] = {}
        self._references: dict[int, list[Floats]] = {}
        if config.needs_reference and self.progress.version:
            file = folder.path / REFERENCE
            self._references = load_references(file, self._compared, config.each)

    @property
    def _compared(self) -> list[int]:
        """Records whose reference log-probs are needed."""
        size = self.config.training.batch_size
        return [*self._examples.learnt_in(self.steps, size), *self._examples.held_out]

    async def main(self, cluster: Cluster, view: LiveView) -> None:
        """The flow, from the first step to the exported model."""
        view.note = "starting workers"
        config = self.config
        groups: Channel[SampleGroup] = cluster.channel(
            SampleGroup, name="groups", capacity=config.training.batch_size
        )
        actors = Actors(await self._launch(cluster))
        teaching = await self._launch_teacher(cluster)
        kept = config.training.keep_checkpoints
        checkpointer = Checkpointer(cluster, actors, self.folder.checkpoints, kept)
        version = self.progress.version
        with (
            groups.sender,
            groups.receiver,
            view.metrics(version if version else None) as metrics,
            teaching or nullcontext(),
        ):
            flow = Flow(actors, groups, checkpointer, metrics, view, teaching)
            if not version:
                await self._compute_references(flow)
                self.progress.before = await self._evaluate(flow)
                if self.progress.before:
                    metrics.write(0, _of_evaluation(self.progress.before))
            with checkpointer, run_signals().checked_each_step():
                await self._train(flow)
                await checkpointer.finish()
            if config.training.export:
                view.note = "exporting"
                await export(actors.export, self.model, self.folder.trained)
                view.note = ""

    async def _launch(self, cluster: Cluster) -> WorkerGroup[LanguageActor]:
        config, part = self.config, self.config.actor.part
        plan = plan_actors(config, cluster.devices)
        device = plan.device("actor", own_process=config.cluster.processes)
        learner = config.learner(str(self.model), device, random=not has_weights(self.model))
        resume = self.folder.checkpoints / self.progress.checkpoint
        return await cluster.launch(
            cast(type[LanguageActor], load_entry_point(part.actor)),
            part.config(learner),
            config.batches,
            backend=config.actor.backend,
            resume=str(resume) if self.progress.version else None,
            max_staleness=None,
            count=config.actors,
            name="Actor",
            collective=plan.collective("actor") if part.collective else None,
            **plan.options(
                "actor", trainer_environment(part, plan, "actor", config.cluster.environment)
            ),
        )

    async def _launch_teacher(self, cluster: Cluster) -> Teaching | None:
        config, teacher = self.config, self.config.taught_by
        if teacher is None:
            return None
        plan = plan_actors(config, cluster.devices)
        device = plan.device("inference", own_process=config.cluster.processes)
        asked = TeacherQuestions(top_k=teacher.top_k, vocabulary=vocabulary_of(self.model))
        workers = await cluster.launch(
            InferenceWorker,
            None,
            InferenceConfig(previous=False, teacher=asked),
            teacher_of(config.actor, teacher.path, device),
            backend=inference_backend(config.actor),
            count=config.inference_workers,
            name="Inference",
            **plan.options("inference", config.cluster.environment),
        )
        size = config.training.batch_size

        def examples_of(step: int) -> list[Example]:
            return self._examples_of(self._examples.batch(step, size))

        return Teaching(workers, examples_of, self.steps)

    # ---- training

    async def _train(self, flow: Flow) -> None:
        clock = TrainingClock(self.progress.train_seconds)
        signals = run_signals()
        flow.view.note = ""
        flow.view.training_begins()
        for step in range(self.progress.version, self.steps):
            await self._put(flow, step)
            reports = await flow.actors.group.call(LanguageActor.run_training, flow.groups.receiver)
            row = self._account(step, reports, clock())
            if self._evaluation_due(step + 1):
                found = await signals.unless_terminating(self._evaluate(flow))
                if found:
                    self.progress.after = found
                    row |= _of_evaluation(found)
            flow.metrics.write(self.progress.version, row)
            # The step boundary: progress and weights are of this version.
            if signals.take_checkpoint_request() or self._checkpoint_due(step + 1):
                await flow.checkpointer.begin(self.progress)
            flow.view.show()
            if signals.leaving:
                await flow.checkpointer.finish()
                await signals.leave()

    async def _put(self, flow: Flow, step: int) -> None:
        """Put the records of a step where their ranks take them."""
        size, ranks = self.config.training.batch_size, self.config.data_ranks
        told: Iterator[TeacherLogProbs] | None = None
        if flow.teaching is not None:
            told = iter(await flow.teaching.of_step(step))
        for at, record in enumerate(self._examples.batch(step, size)):
            number, references = step * size + at, self._references.get(record, ())
            samples = [
                one.sample(
                    number,
                    index,
                    references[index] if references else None,
                    None if told is None else next(told),
                )
                for index, one in enumerate(self._examples[record])
            ]
            group = SampleGroup(iteration=step, group=number, samples=samples)
            await flow.groups.sender.put(group, key=at % ranks)

    def _account(
        self, step: int, reports: Sequence[LanguageTrainReport], seconds: float
    ) -> dict[str, float]:
        """Add a step to the progress; its row of the metrics."""
        progress, metrics = self.progress, reports[0].metrics
        learnt = sum(one.response_tokens for one in reports)
        tokens = learnt + sum(one.prompt_tokens for one in reports)
        each = max(seconds - progress.train_seconds, 1e-9)
        progress.version, progress.train_seconds = step + 1, seconds
        progress.examples += self.config.training.batch_size
        progress.tokens += tokens
        progress.loss = metrics["loss"]
        self._last = {
            "iteration": step,
            "version": progress.version,
            "examples": progress.examples,
            "epoch": progress.examples / len(self._examples),
            "tokens": progress.tokens,
            "learnt_tokens": learnt,
            "train_seconds": seconds,
            "tokens_per_second": tokens / each,
            **{name: metrics[name] for name in REPORTED if name in metrics},
        }
        return dict(self._last)

    def _evaluation_due(self, version: int) -> bool:
        every = self.config.training.evaluate_every
        return version == self.steps or (every > 0 and version % every == 0)

    def _checkpoint_due(self, version: int) -> bool:
        every = self.config.training.checkpoint_every
        return version == self.steps or (every > 0 and version % every == 0)

    # ---- log-probs

    def _examples_of(self, records: Sequence[int]) -> list[Example]:
        return [one for record in records for one in self._examples[record]]

    async def _compute_references(self, flow: Flow) -> None:
        """Compute and keep log-probs under the first weights, before these are trained."""
        if not self.config.needs_reference:
            return
        flow.view.note = "log-probs of the reference"
        records, each = self._compared, self.config.each
        found = await log_probs(flow.actors.group, self._examples_of(records))
        self._references = {
            record: found[each * at : each * (at + 1)] for at, record in enumerate(records)
        }
        save_references(self.folder.path / REFERENCE, self._references)

    async def _evaluate(self, flow: Flow) -> dict[str, float]:
        """Measure held-out records under the present weights; nothing where there are none."""
        records = self._examples.held_out
        if not records:
            return {}
        note, flow.view.note = flow.view.note, "evaluating"
        examples = self._examples_of(records)
        found = await log_probs(flow.actors.group, examples)
        flow.view.note = note
        of_first = [one for record in records for one in self._references.get(record, ())]
        return measured(self.config.loss_config, examples, found, of_first)

    # ---- what is seen of the run

    def headline(self) -> Headline:
        """The top line of the live view."""
        last, progress = self._last, self.progress
        figures = [("examples", f"{progress.examples:,}")]
        shown = (("loss", "loss", ".3f"), ("accuracy", "reward_accuracy", ".2f"))
        for name, column, form in shown:
            if column in last:
                figures.append((name, format(last[column], form)))
        if "loss" in progress.after:
            figures.append(("held-out loss", f"{progress.after['loss']:.3f}"))
        figures.append(("seconds", f"{progress.train_seconds:.0f}"))
        run = f"{self.config.name} (seed {self.config.seed})"
        return Headline(run, progress.version, self.steps, figures)

    @property
    def title(self) -> str:
        """Title of its pictures."""
        return f"{self.config.name}: {self.config.data.path}"

    @property
    def host(self) -> HostConfig:
        """Settings of the host, or hosts, on which the workers run."""
        return self.config.cluster

    def drawings(self, *, ended: bool) -> dict[str, Draw]:
        """The learning curve."""
        if not (ended or self.progress.version):
            return {}
        draw = partial(
            draw_learning_curve,
            self.folder.metrics,
            self.folder.learning_curve,
            title=self.title,
            curves=SUPERVISED,
        )
        return {"learning curve": draw}

    def summary(self, stopped: Stopped | None) -> SupervisedSummary:
        """Return the summary of the run."""
        progress, before, after = self.progress, self.progress.before, self.progress.after
        seconds = max(progress.train_seconds, 1e-9)
        long = {"records that are too long": self._examples.too_long}
        return SupervisedSummary(
            run=self.config.name,
            outcome=stopped.outcome if stopped else "finished",
            error=stopped.error if stopped else None,
            seed=self.config.seed,
            iterations=progress.version,
            train_seconds=progress.train_seconds,
            examples=progress.examples,
            tokens=progress.tokens,
            tokens_per_second=progress.tokens / seconds if progress.version else None,
            loss=progress.loss,
            eval_loss_before=before.get("loss"),
            eval_loss=after.get("loss"),
            eval_reward_accuracy=after.get("reward_accuracy"),
            evaluation_examples=len(self._examples.held_out) if before or after else None,
            dropped=long if self._examples.too_long else {},
        )


def _of_evaluation(found: dict[str, float]) -> dict[str, float]:
    """The columns about an evaluation."""
    return {f"eval_{name}": number for name, number in found.items()}
