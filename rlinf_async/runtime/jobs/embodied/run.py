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
"""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path

import msgspec

from rlinf_async.backends.base import TrainerBackend
from rlinf_async.messages.embodied import Collect, TrainReport
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import EmbodiedSummary
from rlinf_async.runtime.calls import GroupCall
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.group import WorkerGroup
from rlinf_async.runtime.jobs.embodied.base import EnvironmentRun, Flow, LoopContext
from rlinf_async.runtime.jobs.embodied.channels import EmbodiedChannels
from rlinf_async.runtime.jobs.embodied.collectors import Collectors, make_collectors
from rlinf_async.runtime.jobs.embodied.config import EmbodiedConfig
from rlinf_async.runtime.jobs.embodied.playing import Trained
from rlinf_async.runtime.jobs.embodied.recording import record_apart
from rlinf_async.runtime.jobs.embodied.reports import EmbodiedProgress, evaluated_rate, merged
from rlinf_async.runtime.jobs.failures import Stopped
from rlinf_async.runtime.jobs.placement import Plan
from rlinf_async.runtime.jobs.view import LiveView
from rlinf_async.workers.actor import EmbodiedFSDPActor, TrainingPlan
from rlinf_async.workers.env import EvaluatedEpisode


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


def make_trainer(config: EmbodiedConfig) -> TrainerBackend:
    """What reads a checkpoint, in this process; ``config`` is fitted to its environment."""
    from rlinf_async.backends.registry import load_trainer_backend

    return load_trainer_backend("fsdp")(config.actor, 1, 0)


class EmbodiedRun(EnvironmentRun[EmbodiedConfig, EmbodiedProgress, EmbodiedChannels]):
    """A run of PPO; see `EnvironmentRun`.

    Args:
        config: fitted to its environment.
        folder: of the run.
    """

    def __init__(self, config: EmbodiedConfig, folder: RunFolder) -> None:
        super().__init__(config, folder, EmbodiedProgress())
        self._cloned: dict[str, float] = {}
        """metrics of the cloning, where there was one"""
        self._before: list[EvaluatedEpisode] = []
        """episodes of the evaluation before the first iteration"""

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
        flow = Flow(cluster, channels, collectors, view)
        train = partial(self._train, flow, actors)
        await self._train_and_evaluate(flow, ActorShards(actors), train)

    def _with_demonstrations(self) -> EmbodiedConfig:
        """Record demonstrations in the run folder; return the configuration that clones them."""
        wanted, folder = self.config.demonstrations, self.folder.path / "demonstrations"
        shutil.rmtree(folder, ignore_errors=True)  # of a start that came to no checkpoint
        record_apart(self.config, wanted, folder)
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

    async def _train(
        self,
        flow: Flow[EmbodiedChannels],
        actors: WorkerGroup[EmbodiedFSDPActor],
        loop: LoopContext,
    ) -> None:
        channels, first = flow.channels, self.progress.version
        if not first and self.config.actor.cloning.demonstrations:
            await self._clone(actors, flow.view)
        await actors.call(EmbodiedFSDPActor.sync_model_to_rollout, channels.weights.sender)
        if not first and self.config.evaluation.before:
            self._before = await self._evaluate(flow, min_version=0)
            flow.view.note = ""
        collecting = flow.collectors.collect()
        loop.clock.start()
        checkpointer, signals = loop.checkpointer, loop.signals
        # A restarted env worker may send a trajectory again when the actors are done already.
        with channels.trajectories.receiver, checkpointer, signals.checked_each_step():
            with channels.tickets.sender:
                await self._issue_first(channels)
                iterations = range(first, self.config.iterations)
                calls = (self._train_iteration(channels, actors) for _ in iterations)
                training = next(calls, None)
                while training is not None:
                    report = merged(await training)
                    await self._step_boundary(channels, report, loop)
                    leaving = signals.leaving
                    # The next one is trained while this process accounts for this one.
                    training = None if leaving else next(calls, None)
                    self._write_row(report, loop.metrics)
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

    # ---- pictures, summary

    @property
    def trained(self) -> Trained:
        """What lets the policy of a checkpoint act: for pictures."""
        return Trained(self.config, partial(make_trainer, self.config))

    def summary(self, stopped: Stopped | None) -> EmbodiedSummary:
        """What came of the run."""
        summary = super().summary(stopped)
        summary.success_rate_before = evaluated_rate(self._before, self.progress)
        summary.extra.update({name: f"{value:g}" for name, value in self._cloned.items()})
        return summary
