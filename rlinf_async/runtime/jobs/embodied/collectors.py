"""The workers that collect trajectories, and the channels of a run: env and rollout workers, or env
workers that run the policy themselves.

The run uses both in the same way: it puts tickets, trajectories come, and at the end it evaluates.

::

    this process --Collect, by key of the env rank--> env worker
    env worker --Observations--> rollout worker --Actions, by key of the stage--> env worker
    env worker --Trajectory, by key of the DP rank--> actor --TrainReport--> this process
    actor --WeightUpdate, `Latest`--> rollout worker
    env worker --EvaluatedEpisode--> this process, at the end

Observations and actions are there only where rollout workers are: where each env worker runs the
policy itself, it takes the weights.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Final

from rlinf_async.channels import Channel, Latest
from rlinf_async.messages.embodied import Actions, Collect, Observations, Trajectory
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.runtime.calls import GroupCall, WorkerGroup
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.checkpoints import PERIOD, in_background, max_deliveries
from rlinf_async.runtime.jobs.embodied.intervening import Intervening
from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.runtime.jobs.view import LiveView
from rlinf_async.runtime.supervise import Restart, Supervisor
from rlinf_async.workers.collocated import CollocatedEnvWorker
from rlinf_async.workers.env import (
    EnvConfig,
    EnvError,
    EnvReport,
    EnvWorker,
    EvaluatedEpisode,
    EvaluationPlan,
)
from rlinf_async.workers.rollout.policy import RolloutReport, RolloutWorker

ENVS: Final = "Env"
"""name of the env workers"""


class EmbodiedChannels:
    """Every channel of the run.

    Capacities follow from admission: there are never more than ``max_staleness + 1`` iterations
    under way, and each stage of an env worker waits for one answer at a time.
    """

    def __init__(self, cluster: Cluster, config: EnvironmentSettings) -> None:
        counts = config.cluster
        once = max_deliveries(1, counts.max_restarts)
        ahead = config.training.max_staleness + 1
        self.tickets: Channel[Collect] = cluster.channel(
            Collect,
            name="tickets",
            capacity=ahead,
            max_deliveries=once,
        )
        self.trajectories: Channel[Trajectory] = cluster.channel(
            Trajectory,
            name="trajectories",
            capacity=config.trajectories * ahead,
            max_deliveries=once,  # where they are leased: by a replay worker
        )
        self.evaluated: Channel[EvaluatedEpisode] = cluster.channel(
            EvaluatedEpisode, name="evaluated"
        )
        self.weights: Latest[WeightUpdate] = cluster.latest(WeightUpdate, name="weights")
        if counts.rollout_count:
            stages = config.env.stages + 1  # one more for the evaluation
            self.observations: Channel[Observations] = cluster.channel(
                Observations,
                name="observations",
                capacity=stages * counts.env_workers,
                max_deliveries=max_deliveries(counts.rollout_count, counts.max_restarts),
            )
            self.actions: Channel[Actions] = cluster.channel(Actions, name="actions", capacity=2)
        self.intervening = Intervening(cluster, config)


class Collectors(ABC):
    """The workers that turn tickets into trajectories."""

    def __init__(
        self,
        cluster: Cluster,
        config: EnvironmentSettings,
        channels: EmbodiedChannels,
        plan: PlacementPlan,
    ) -> None:
        self._cluster, self._config, self._channels = cluster, config, channels
        self._plan = plan

    @abstractmethod
    async def launch(self) -> None:
        """Start the workers."""

    def serving(self) -> AbstractContextManager[object]:
        """The ends that stay open until the evaluation is done."""
        return nullcontext()

    @abstractmethod
    def collect(self) -> GroupCall[list[EnvReport]]:
        """Collect one iteration for each ticket, until the tickets end."""

    @abstractmethod
    async def evaluate(self, plan: EvaluationPlan) -> list[EvaluatedEpisode]:
        """Run the plan's episodes. Each also goes into the channel ``evaluated`` when it ends."""

    async def limit_failures(self, before: int) -> None:
        """Go on until more episodes have failed than the run may have, ``before`` of them in
        earlier starts.

        Raises:
            EnvError: they have; it names the last.
        """
        while True:
            self._check_failures(before + sum(one.failed_episodes for one in self.env_workers))
            await asyncio.sleep(PERIOD)

    def _check_failures(self, failed: int) -> None:
        most = self._config.env.max_failures
        if failed <= most:
            return
        last = max(self.env_workers, key=lambda one: one.failed_at).last_failure
        raise EnvError(
            f"{failed} episodes have ended with the process of their environment, more than "
            f"env.max_failures = {most}; the last: {last}. Mend the environment, or raise the "
            "limit, and go on with --resume"
        )

    @property
    def env_workers(self) -> Sequence[Supervisor]:
        """The env workers, once they are launched."""
        group = self._cluster.groups.get(ENVS)
        return () if group is None else group.supervisors

    async def finish(self) -> None:  # noqa: B027
        """Wait for the workers that still serve, once the weights have ended."""


class SeparateCollectors(Collectors):
    """Env workers and rollout workers, each in a process of its own: they overlap."""

    async def launch(self) -> None:
        config, counts = self._config, self._config.cluster
        envs, rollouts = await asyncio.gather(
            self._cluster.launch(
                EnvWorker,
                config.env,
                actor_ranks=config.trajectory_ranks,
                person_seconds=self._channels.intervening.seconds,
                count=counts.env_workers,
                name=ENVS,
                restart=Restart(max=counts.max_restarts),
                **self._plan.options("env", counts.environment),
            ),
            self._cluster.launch(
                RolloutWorker,
                config.acting_policy,
                config.rollout,
                count=counts.rollout_count,
                name="Rollout",
                restart=Restart(max=counts.max_restarts),
                **self._plan.options("rollout", counts.environment),
            ),
        )
        self._envs: WorkerGroup[EnvWorker] = envs
        self._serving: GroupCall[list[RolloutReport]] = rollouts.call(
            RolloutWorker.serve,
            self._channels.observations.receiver,
            self._channels.actions.sender,
            self._channels.weights.receiver,
        )

    def serving(self) -> AbstractContextManager[object]:
        ends = ExitStack()
        ends.enter_context(self._channels.observations.sender)
        ends.enter_context(self._channels.actions.receiver)
        return ends

    def collect(self) -> GroupCall[list[EnvReport]]:
        return self._envs.call(
            EnvWorker.collect,
            self._channels.tickets.receiver,
            self._channels.observations.sender,
            self._channels.actions.receiver,
            self._channels.trajectories.sender,
            *self._channels.intervening.ends,
        )

    async def evaluate(self, plan: EvaluationPlan) -> list[EvaluatedEpisode]:
        shares = await self._envs.call(
            EnvWorker.evaluate,
            plan,
            self._channels.observations.sender,
            self._channels.actions.receiver,
            self._channels.evaluated.sender,
        )
        return [episode for share in shares for episode in share]

    async def finish(self) -> None:
        await self._serving


class CollocatedCollectors(Collectors):
    """Each env worker runs the policy itself: for environments whose steps are short."""

    async def launch(self) -> None:
        config, counts = self._config, self._config.cluster
        self._envs: WorkerGroup[CollocatedEnvWorker] = await self._cluster.launch(
            CollocatedEnvWorker,
            config.env,
            config.acting_policy,
            config.rollout,
            actor_ranks=config.trajectory_ranks,
            person_seconds=self._channels.intervening.seconds,
            count=counts.env_workers,
            name=ENVS,
            restart=Restart(max=counts.max_restarts),
            **self._plan.options("env", counts.environment),
        )

    def collect(self) -> GroupCall[list[EnvReport]]:
        return self._envs.call(
            CollocatedEnvWorker.collect,
            self._channels.tickets.receiver,
            self._channels.trajectories.sender,
            self._channels.weights.receiver,
            *self._channels.intervening.ends,
        )

    async def evaluate(self, plan: EvaluationPlan) -> list[EvaluatedEpisode]:
        shares = await self._envs.call(
            CollocatedEnvWorker.evaluate,
            plan,
            self._channels.weights.receiver,
            self._channels.evaluated.sender,
        )
        return [episode for share in shares for episode in share]


def make_collectors(
    cluster: Cluster, config: EnvironmentSettings, channels: EmbodiedChannels, plan: PlacementPlan
) -> Collectors:
    """The collectors that the configuration asks for."""
    kind = SeparateCollectors if config.cluster.rollout_count else CollocatedCollectors
    return kind(cluster, config, channels, plan)


async def evaluate(
    cluster: Cluster,
    config: EnvironmentSettings,
    channels: EmbodiedChannels,
    collectors: Collectors,
    view: LiveView,
    *,
    min_version: int,
    env: EnvConfig | None,
) -> list[EvaluatedEpisode]:
    """Run the configured episodes with weights of at least this version; show how far it is."""
    wanted = config.evaluation
    plan = EvaluationPlan(wanted.episodes, wanted.seed, min_version, env)
    with in_background(cluster, _count(wanted.episodes, channels, view), "evaluation"):
        return await collectors.evaluate(plan)


async def _count(wanted: int, channels: EmbodiedChannels, view: LiveView) -> None:
    view.note = f"evaluating: 0 of {wanted} episodes"
    done = set[int]()  # an env worker that was restarted evaluates its share again
    async for one in channels.evaluated.receiver:
        done.add(one.episode)
        view.note = f"evaluating: {len(done)} of {wanted} episodes"
