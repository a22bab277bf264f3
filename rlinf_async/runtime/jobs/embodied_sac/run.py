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

import asyncio
import os
import time
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from rlinf_async.backends.base import OffPolicyTrainer
from rlinf_async.backends.parts import DEFAULT_OFF_POLICY_TRAINER, off_policy_trainers
from rlinf_async.config import ConfigError
from rlinf_async.data.config import DataError
from rlinf_async.data.demonstrations import FILE, Bounds, check_demonstrations
from rlinf_async.data.lerobot import is_lerobot
from rlinf_async.messages.embodied import Collect, Collected, TrainReport
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import EmbodiedSummary
from rlinf_async.runtime.calls import WorkerGroup
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.checkpoints import Stopped, sibling
from rlinf_async.runtime.jobs.embodied.beginning import Beginning
from rlinf_async.runtime.jobs.embodied.collectors import make_collectors
from rlinf_async.runtime.jobs.embodied.playing import TrainedPolicy, record_for_run, recorded_in
from rlinf_async.runtime.jobs.embodied.run import (
    EmbodiedFlow,
    EmbodiedProgress,
    EnvironmentRun,
    LoopContext,
)
from rlinf_async.runtime.jobs.embodied_sac.config import FittedSac, ReplaySettings, SacChannels
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.runtime.jobs.view import LiveView
from rlinf_async.runtime.supervise import Never, Restart
from rlinf_async.workers.actor import GradientPlan, SacActor, SacReport
from rlinf_async.workers.env.goals import Goals
from rlinf_async.workers.replay.worker import STATE, ReplayPlan, ReplayWorker, read_state

ReplayedT = TypeVar("ReplayedT", bound=ReplaySettings)

REPLAY = "replay"
"""name of the store's folder, in a checkpoint and in the run folder"""


class SacProgress(EmbodiedProgress, kw_only=True):
    """Progress of a run."""

    updates: int = 0
    """number of gradient steps"""
    second_batches: int = 0
    """shares of batches that came to a rank twice, and were trained once"""


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


def make_trainer(
    config: ReplaySettings, name: str = DEFAULT_OFF_POLICY_TRAINER
) -> OffPolicyTrainer:
    """Return a trainer that reads a checkpoint, in this process."""
    part = off_policy_trainers.load(name)
    return part.make(config.actor, config.acting_policy, 1, 0)


def check_transitions(folder: Path, config: ReplaySettings, bounds: Bounds) -> None:
    """Raise `DataError` unless the folder has transitions of the run's environment, whose actions
    lie within ``bounds``."""
    info = check_demonstrations(
        folder,
        config.acting_policy.sees,
        config.acting_policy.acts.columns,
        discrete=config.acting_policy.acts.discrete,
        bounds=bounds,
        transitions=True,
    )
    if info.env != config.env.name and not is_lerobot(folder):  # that knows a robot's name alone
        raise DataError(
            f"the demonstrations in {str(folder)!r} are of {info.env}, but the run is in "
            f"{config.env.name}, and learns from their rewards: record them in this environment; "
            f"or write its name into their {FILE}, where it pays the same"
        )
    ours = config.env.reward.said_by
    if info.rewards is not None and info.rewards != ours:
        theirs, said = (
            f"by {one}" if one else "by the environment" for one in (info.rewards, ours)
        )
        raise DataError(
            f"the rewards of the demonstrations in {str(folder)!r} are said {theirs}, and those of "
            f"the run {said} (env.reward): record them as the run is, or write {ours!r} as rewards "
            f"into their {FILE}, where it pays the same; what judges evaluations alone is "
            "evaluation.env.reward"
        )


class ReplayRun(EnvironmentRun[ReplayedT, SacProgress, SacChannels]):
    """A run that learns from batches of a replay worker; see `EnvironmentRun`.

    Args:
        config: fitted to its environment.
        folder: the run's folder.
        beginning: weights that it begins with; None: new ones.
        progress: where nothing was trained yet.
    """

    trainer: ClassVar[str] = DEFAULT_OFF_POLICY_TRAINER
    """name of what trains"""
    experience: ClassVar[bool] = True
    """whether own experience is learnt from"""

    def __init__(
        self,
        config: ReplayedT,
        folder: RunFolder,
        beginning: Beginning | None = None,
        progress: SacProgress | None = None,
    ) -> None:
        begun = progress or SacProgress()
        super().__init__(config, folder, begun, beginning, file=f"{REPLAY}/{STATE}")
        self._store = self._store_folder()

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
        if self.config.demonstrations.policy:
            self.config = await self._with_demonstrations(view)
        channels = SacChannels(cluster, self.config)
        plan = self.config.plan(cluster.devices)
        collectors = make_collectors(cluster, self.config, channels, plan)
        # One after the other where all share a process: they share torch's random numbers, too.
        actor = await self._launch_actor(cluster, plan)
        replay = await self._launch_replay(cluster, plan)
        watching = await channels.intervening.launch()
        await collectors.launch()
        flow = EmbodiedFlow(cluster, channels, collectors, view)
        train = partial(self._train, flow, actor, replay)
        await self._train_and_evaluate(flow, SacShards(actor, replay), train)
        await channels.intervening.end(watching)

    async def _with_demonstrations(self, view: LiveView) -> ReplayedT:
        """Record demonstrations where the run begins; return the configuration that draws them.

        Raises `DataError` where they are damaged, or not what the run can learn from.
        """
        config, folder = self.config, recorded_in(self.folder.path)
        if not self.progress.version:
            view.note = "recording demonstrations"
            await asyncio.to_thread(record_for_run, config, config.demonstrations, self.folder.path)
        await asyncio.to_thread(check_transitions, folder, config, ())
        replay = msgspec.structs.replace(config.replay, demonstrations=str(folder.resolve()))
        return msgspec.structs.replace(config, replay=replay)

    # ---- workers

    @property
    def goals(self) -> Goals | None:
        """Where the environment shows goals, if transitions get others in hindsight."""
        return None

    @property
    def _resume(self) -> Path | None:
        """The checkpoint to go on from."""
        progress = self.progress
        return self.folder.checkpoints / progress.checkpoint if progress.version else None

    async def _launch_actor(self, cluster: Cluster, plan: PlacementPlan) -> WorkerGroup[SacActor]:
        counts = self.config.cluster
        device = plan.device("actor", own_process=counts.processes)
        fsdp = msgspec.structs.replace(self.config.actor.fsdp, device=device)
        resume = self._resume
        return await cluster.launch(
            SacActor,
            msgspec.structs.replace(self.config.actor, fsdp=fsdp),
            self.config.acting_policy,
            backend=self.trainer,
            resume=None if resume is None else str(resume),
            first=self.first_weights(),
            name="Actor",
            count=counts.actors,
            collective=plan.collective("actor"),
            **plan.options("actor", counts.environment),
        )

    async def _launch_replay(
        self, cluster: Cluster, placed: PlacementPlan
    ) -> WorkerGroup[ReplayWorker]:
        config, policy, resume = self.config, self.config.acting_policy, self._resume
        counts, of_env = config.cluster, placed.options("env", config.cluster.environment)
        plan = ReplayPlan(
            observation=policy.observation,
            action=policy.action,
            gamma=config.actor.losses.gamma,
            seed=config.replay.seed,
            iterations=config.iterations,
            iteration_steps=config.iteration_steps,
            ranks=config.cluster.actors,
            spare=config.spare,
            folder="" if self._store is None else str(self._store.resolve()),
            start=f"{self._owner}started at {time.time_ns()}",
            resume="" if resume is None else str(resume / REPLAY),
            intervened=bool(config.asked.person and config.asked.demonstrates),
            acts=config.asked.acts,
            goals=self.goals,
            env=None if self.goals is None else config.env,
            experience=self.experience,
        )
        outlives = config.replay.storage == "disk" or not self.experience
        return await cluster.launch(
            ReplayWorker,
            config.store,
            plan,
            name="Replay",
            restart=Restart(max=config.cluster.max_restarts) if outlives else Never(),
            env_vars=of_env["env_vars"] if self.goals is not None else counts.environment,
        )

    # ---- training

    async def _train(
        self,
        flow: EmbodiedFlow[SacChannels],
        actor: WorkerGroup[SacActor],
        replay: WorkerGroup[ReplayWorker],
        loop: LoopContext,
    ) -> None:
        channels = flow.channels
        await actor.call(SacActor.sync_model_to_rollout, channels.weights.sender)
        await self._evaluate_before(flow)
        serving = replay.call(
            ReplayWorker.serve,
            channels.trajectories.receiver,
            channels.requests.receiver,
            channels.batches.sender,
        )
        collecting = flow.collectors.collect()
        loop.clock.start()
        flow.view.training_begins()
        checkpointer, signals = loop.checkpointer, loop.signals
        with (
            channels.requests.sender,
            channels.batches.receiver,
            checkpointer,
            signals.checked_each_step(),
        ):
            with channels.tickets.sender:
                await self._issue_first(channels)
                while (iteration := self.progress.version) < self._iterations:
                    report = await self._train_iteration(channels, actor, replay, iteration)
                    await self._step_boundary(channels, report, loop)
                    self._write_row(report, loop.metrics)
                    await self._call_hook(report, checkpointer, flow.view)
                    flow.view.show()
                    if signals.leaving:
                        await checkpointer.finish()
                        await signals.leave()
            await checkpointer.finish()
            self._env_reports = await collecting
        await serving

    @abstractmethod
    async def _train_iteration(
        self,
        channels: SacChannels,
        actor: WorkerGroup[SacActor],
        replay: WorkerGroup[ReplayWorker],
        iteration: int,
    ) -> TrainReport:
        """Let the actor learn from what there is in the store."""

    async def _learn(
        self, channels: SacChannels, actor: WorkerGroup[SacActor], iteration: int
    ) -> SacReport:
        """Take the gradient steps of an iteration, and publish the policy."""
        config = self.config
        plan = GradientPlan(
            updates=config.updates(iteration),
            prefetch=config.replay.prefetch,
            priorities=config.store.prioritized,
        )
        trained = await actor.call(
            SacActor.run_training,
            plan,
            channels.requests.sender,
            channels.batches.receiver,
            channels.weights.sender,
        )
        self.progress.updates += plan.updates
        self.progress.second_batches += sum(one.duplicates for one in trained)
        return trained[0]

    # ---- pictures, summary

    @property
    def trained(self) -> TrainedPolicy:
        """What lets the policy of a checkpoint act, for pictures."""
        return TrainedPolicy(self.config, partial(make_trainer, self.config, self.trainer))

    def summary(self, stopped: Stopped | None) -> EmbodiedSummary:
        """Return the summary of the run."""
        summary = super().summary(stopped)
        if self.progress.version:
            summary.extra["gradient steps"] = self.progress.updates
            summary.dropped["second batches"] = self.progress.second_batches
        return summary


class SacRun(ReplayRun[FittedSac]):
    """A run of soft actor-critic."""

    @property
    def goals(self) -> Goals | None:
        return self.config.goals

    async def _train_iteration(
        self,
        channels: SacChannels,
        actor: WorkerGroup[SacActor],
        replay: WorkerGroup[ReplayWorker],
        iteration: int,
    ) -> TrainReport:
        """Let the trajectories into the store, and the actor learn from it."""
        wanted = self.config.trajectories
        [collected] = await replay.call(ReplayWorker.collect, iteration, wanted)
        learnt = await self._learn(channels, actor, iteration)
        return _report(collected, learnt.version, learnt.metrics)

    def _ticket(self, iteration: int) -> Collect:
        return msgspec.structs.replace(super()._ticket(iteration), transitions=True)


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
            **(collected.intervention.metrics() if collected.intervention is not None else {}),
        },
        env_steps=collected.env_steps,
        lag_mean=collected.lag_mean,
        lag_max=collected.lag_max,
        duplicates=collected.duplicates,
        episode_return=collected.episode_return,
        episode_length=collected.episode_length,
        episode_success=collected.episode_success,
        episode_level=collected.episode_level,
        control=collected.control,
    )
