"""The workers that collect trajectories: env and rollout workers, or env workers that run the
policy themselves.

The run uses both in the same way: it puts tickets, trajectories come, and at the end it evaluates.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Protocol

from rlinf_async.runtime.calls import GroupCall
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.group import WorkerGroup
from rlinf_async.runtime.jobs.embodied.channels import EmbodiedChannels
from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings
from rlinf_async.runtime.jobs.placement import Plan
from rlinf_async.runtime.supervise import Restart
from rlinf_async.workers.collocated import CollocatedEnvWorker
from rlinf_async.workers.env import EnvReport, EnvWorker, EvaluatedEpisode, EvaluationPlan
from rlinf_async.workers.rollout import RolloutReport, RolloutWorker


class Collectors(Protocol):
    """The workers that turn tickets into trajectories."""

    async def launch(self) -> None:
        """Start the workers."""
        ...

    def serving(self) -> AbstractContextManager[object]:
        """The ends that stay open until the evaluation is done."""
        ...

    def collect(self) -> GroupCall[list[EnvReport]]:
        """Collect one iteration for each ticket, until the tickets end."""
        ...

    async def evaluate(self, plan: EvaluationPlan) -> list[EvaluatedEpisode]:
        """Run the plan's episodes. Each also goes into the channel ``evaluated`` when it ends."""
        ...

    async def finish(self) -> None:
        """Wait for the workers that still serve, once the weights have ended."""
        ...


class SeparateCollectors:
    """Env workers and rollout workers, each in a process of its own: they overlap."""

    def __init__(
        self, cluster: Cluster, config: EnvironmentSettings, channels: EmbodiedChannels, plan: Plan
    ) -> None:
        self._cluster, self._config, self._channels = cluster, config, channels
        self._plan = plan

    async def launch(self) -> None:
        config, counts = self._config, self._config.cluster
        envs, rollouts = await asyncio.gather(
            self._cluster.launch(
                EnvWorker,
                config.env,
                actor_ranks=config.trajectory_ranks,
                count=counts.env_workers,
                name="Env",
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


class CollocatedCollectors:
    """Each env worker runs the policy itself: for environments whose steps are short."""

    def __init__(
        self, cluster: Cluster, config: EnvironmentSettings, channels: EmbodiedChannels, plan: Plan
    ) -> None:
        self._cluster, self._config, self._channels = cluster, config, channels
        self._plan = plan

    async def launch(self) -> None:
        config, counts = self._config, self._config.cluster
        self._envs: WorkerGroup[CollocatedEnvWorker] = await self._cluster.launch(
            CollocatedEnvWorker,
            config.env,
            config.acting_policy,
            config.rollout,
            actor_ranks=config.trajectory_ranks,
            count=counts.env_workers,
            name="Env",
            restart=Restart(max=counts.max_restarts),
            **self._plan.options("env", counts.environment),
        )

    def serving(self) -> AbstractContextManager[object]:
        return nullcontext()

    def collect(self) -> GroupCall[list[EnvReport]]:
        return self._envs.call(
            CollocatedEnvWorker.collect,
            self._channels.tickets.receiver,
            self._channels.trajectories.sender,
            self._channels.weights.receiver,
        )

    async def evaluate(self, plan: EvaluationPlan) -> list[EvaluatedEpisode]:
        shares = await self._envs.call(
            CollocatedEnvWorker.evaluate,
            plan,
            self._channels.weights.receiver,
            self._channels.evaluated.sender,
        )
        return [episode for share in shares for episode in share]

    async def finish(self) -> None:
        """No call is running: each has been awaited."""


def make_collectors(
    cluster: Cluster, config: EnvironmentSettings, channels: EmbodiedChannels, plan: Plan
) -> Collectors:
    """The collectors that the configuration asks for."""
    kind = SeparateCollectors if config.cluster.rollout_count else CollocatedCollectors
    return kind(cluster, config, channels, plan)
