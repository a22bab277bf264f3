"""One run that learns a world model, from the recorded episodes to the model's file.

::

    this process --train, so many steps--> actors --means of losses--> row of the metrics
                 --measure--> actors --model against held-out episodes--> columns, and in words
                 --export--> actors --> world_model.safetensors

Which windows make a step is a function of the episodes and the step, and each actor has read them
all: a checkpoint is the weights and the number of the step.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from rlinf_async.backends.world_model.config import FILE, WorldModelInfo, WorldModelTrainerConfig
from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.pictures import WORLD_MODEL, draw_learning_curve
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import WorldModelSummary
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
from rlinf_async.runtime.jobs.embodied.playing import record_apart, recorded_in
from rlinf_async.runtime.jobs.run import Draw, TrainingClock
from rlinf_async.runtime.jobs.view import Headline, LiveView
from rlinf_async.runtime.jobs.world_model.config import WorldModelConfig
from rlinf_async.runtime.signals import run_signals
from rlinf_async.workers.actor.world_model import WorldModelActor


class WorldModelProgress(RunProgress, kw_only=True):
    """Progress of a run; its version is the number of iterations."""

    loss: float | None = None
    measured: dict[str, float] = msgspec.field(default_factory=dict)
    """what the last comparison with held-out episodes has found"""


class WorldModelRun:
    """Records where it is to, trains, compares, leaves the model.

    Args:
        config: the run's configuration.
        info: what the model is of.
        folder: the run's folder.
    """

    def __init__(self, config: WorldModelConfig, info: WorldModelInfo, folder: RunFolder) -> None:
        self.config, self.info, self.folder = config, info, folder
        clean(folder.checkpoints)
        found = load_progress(folder.checkpoints, WorldModelProgress)
        self.progress = found or WorldModelProgress()
        self._last: Mapping[str, float] = {}

    async def main(self, cluster: Cluster, view: LiveView) -> None:
        """The flow, from the recorded episodes to the model's file."""
        folders = self.config.data.folders or (str(await self._recorded(view)),)
        view.note = "starting workers"
        actors = ActorShards(await self._launch(cluster, folders))
        kept = self.config.training.keep_checkpoints
        checkpointer = Checkpointer(cluster, actors, self.folder.checkpoints, kept)
        version = self.progress.version
        with view.metrics(version if version else None) as metrics:
            if not version and (found := await self._measure(actors, view)):
                metrics.write(0, _columns(found))
            with checkpointer, run_signals().checked_each_step():
                await self._train(actors, checkpointer, metrics, view)
                await checkpointer.finish()
            view.note = "writing the model"
            await actors.group.call(WorldModelActor.export, str(self.folder.path / FILE))
            view.note = ""
        for line in compared(self.info, self.progress.measured):
            print(f"{self.config.name}: {line}", flush=True)

    async def _recorded(self, view: LiveView) -> Path:
        """Record episodes in the run folder where the run begins; failures are kept: they say
        where the environment ends, too."""
        config, folder = self.config.reality, recorded_in(self.folder.path)
        if not self.progress.version:
            view.note = "recording episodes"
            shutil.rmtree(folder, ignore_errors=True)  # of a start that came to no checkpoint
            record = partial(record_apart, keep_failures=True)
            await asyncio.to_thread(record, config, config.demonstrations, folder)
        return folder

    async def _launch(
        self, cluster: Cluster, folders: tuple[str, ...]
    ) -> WorkerGroup[WorldModelActor]:
        config, counts = self.config, self.config.cluster
        plan = config.plan(cluster.devices)
        trainer = WorldModelTrainerConfig(
            info=self.info,
            fsdp=config.actor.on(plan.device("actor", own_process=counts.processes)),
            folders=folders,
            held_out=config.data.held_out,
            batch_size=config.training.batch_size,
            seed=config.seed,
        )
        resume = self.folder.checkpoints / self.progress.checkpoint
        return await cluster.launch(
            WorldModelActor,
            trainer,
            resume=str(resume) if self.progress.version else None,
            count=counts.actors,
            name="Actor",
            collective=plan.collective("actor"),
            **plan.options("actor", counts.environment),
        )

    async def _train(
        self,
        actors: ActorShards,
        checkpointer: Checkpointer,
        metrics: MetricsWriter,
        view: LiveView,
    ) -> None:
        training, progress, signals = self.config.training, self.progress, run_signals()
        clock = TrainingClock(progress.train_seconds)
        view.note = ""
        view.training_begins()
        while progress.version < training.iterations:
            reports = await actors.group.call(WorldModelActor.train, training.steps_per_iteration)
            row = self._account(reports[0], clock())
            if self._due(training.measure_every):
                row |= _columns(await self._measure(actors, view))
            metrics.write(progress.version, row)
            # The step boundary: progress and weights are of this version.
            if signals.take_checkpoint_request() or self._due(training.checkpoint_every):
                await checkpointer.begin(progress)
            view.show()
            if signals.leaving:
                await checkpointer.finish()
                await signals.leave()

    @property
    def _ended(self) -> bool:
        return self.progress.version >= self.config.training.iterations

    def _due(self, every: int) -> bool:
        return self._ended or (every > 0 and self.progress.version % every == 0)

    def _account(self, report: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Add an iteration to the progress; its row of the metrics."""
        progress, training = self.progress, self.config.training
        progress.version += 1
        taken = max(seconds - progress.train_seconds, 1e-9)
        progress.train_seconds = seconds
        self._last, progress.loss = report, report["loss"]
        return {
            "iteration": progress.version - 1,
            "version": progress.version,
            "updates": progress.version * training.steps_per_iteration,
            "train_seconds": seconds,
            "updates_per_second": training.steps_per_iteration / taken,
            **report,
        }

    async def _measure(self, actors: ActorShards, view: LiveView) -> dict[str, float]:
        """Compare the model with held-out episodes; nothing where there are none."""
        if not self.config.data.held_out:
            return {}
        note, view.note = view.note, "comparing model and reality"
        found = (await actors.group.call(WorldModelActor.measure))[0]
        view.note = note
        self.progress.measured = found
        return found

    # ---- what is seen of the run

    def headline(self) -> Headline:
        """The top line of the live view."""
        figures = [
            (name, f"{self._last[name]:.3f}")
            for name in ("loss", "reward_loss")
            if name in self._last
        ]
        figures.append(("seconds", f"{self.progress.train_seconds:.0f}"))
        run = f"{self.config.name} (seed {self.config.seed})"
        return Headline(run, self.progress.version, self.config.training.iterations, figures)

    @property
    def title(self) -> str:
        """Title of its pictures."""
        return f"{self.config.name}: {self.info.env}"

    @property
    def host(self) -> HostConfig:
        """Settings of the host, or hosts, on which the workers run."""
        return self.config.cluster

    def drawings(self, *, ended: bool) -> dict[str, Draw]:
        """The learning curve."""
        if not (ended or self.progress.version):
            return {}
        files = self.folder.metrics, self.folder.learning_curve
        draw = partial(draw_learning_curve, *files, title=self.title, curves=WORLD_MODEL)
        return {"learning curve": draw}

    def summary(self, stopped: Stopped | None) -> WorldModelSummary:
        """Return the summary of the run."""
        progress = self.progress
        return WorldModelSummary(
            run=self.config.name,
            outcome=stopped.outcome if stopped else "finished",
            error=stopped.error if stopped else None,
            seed=self.config.seed,
            iterations=progress.version,
            train_seconds=progress.train_seconds,
            updates=progress.version * self.config.training.steps_per_iteration,
            loss=progress.loss,
            held_out=self.config.data.held_out or None,
            measured=progress.measured,
        )


def _columns(found: Mapping[str, float]) -> dict[str, float]:
    return {f"eval_{name}": number for name, number in found.items()}


def compared(info: WorldModelInfo, found: Mapping[str, float]) -> list[str]:
    """Return model and reality in words; nothing where they were not compared."""
    if not found:
        return []
    lines = []
    far = f"after {info.sizes.horizon} steps (or the last of an episode)"
    for word, when in (("1", "after 1 step"), ("k", far)):
        parts = [
            f"{part.name} off by {found[f'{part.name}_error_{word}']:.3f} (if nothing changed: "
            f"{found[f'still_{part.name}_error_{word}']:.3f})"
            for part in info.observation.parts
            if part.kind != "text"
        ]
        parts.append(f"reward by {found[f'reward_error_{word}']:.3f}")
        lines.append(f"model and reality {when}: {', '.join(parts)}")
    lines.append(
        f"return of an episode in the model {found['return_model']:.3f}, in reality "
        f"{found['return_real']:.3f}; {found['end_accuracy']:.0%} end when they do, give or take a "
        "step"
    )
    return lines
