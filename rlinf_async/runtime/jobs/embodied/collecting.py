"""Who collects trajectories: env and rollout workers apart, or both in one process.

Both ways are the same to the run: tickets go in, trajectories come out, and at the end there is an
evaluation.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Protocol

from rlinf_async.channels import Channel, Latest
from rlinf_async.messages.embodied import Actions, Collect, Observations, Trajectory
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.runtime.calls import GroupCall
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.group import WorkerGroup
from rlinf_async.runtime.jobs.embodied.config import EmbodiedConfig
from rlinf_async.runtime.jobs.lost import deliveries
from rlinf_async.runtime.supervise import Restart
from rlinf_async.workers.collocated import CollocatedEnvWorker
from rlinf_async.workers.env import EnvReport, EnvWorker, EvaluatedEpisode, EvaluationPlan
from rlinf_async.workers.rollout import RolloutReport, RolloutWorker


class Ways(Protocol):
    """What collectors take from, and give to, the rest of the run."""

    tickets: Channel[Collect]
    trajectories: Channel[Trajectory]
    weights: Latest[WeightUpdate]


class Collectors(Protocol):
    """The workers that turn tickets into trajectories."""

    async def launch(self) -> None:
        """Start them."""
        ...

    def serving(self) -> AbstractContextManager[object]:
        """What has to be open until the evaluation is done."""
        ...

    def collect(self) -> GroupCall[list[EnvReport]]:
        """Work off the tickets."""
        ...

    async def evaluate(self, plan: EvaluationPlan) -> list[EvaluatedEpisode]:
        """Run the plan's episodes."""
        ...

    async def finish(self) -> None:
        """Wait for what still runs, once the weights have ended."""
        ...


class Apart:
    """Env workers and rollout workers, each with a process of its own: they overlap."""

    def __init__(self, cluster: Cluster, config: EmbodiedConfig, ways: Ways) -> None:
        self._cluster, self._config, self._ways = cluster, config, ways
        stages, counts = config.env.stages + 1, config.cluster  # one more for the evaluation
        self._observations: Channel[Observations] = cluster.channel(
            Observations,
            name="observations",
            capacity=stages * counts.env_workers,
            max_deliveries=deliveries(counts.rollout_workers, counts.max_restarts),
        )
        self._actions: Channel[Actions] = cluster.channel(Actions, name="actions", capacity=2)

    async def launch(self) -> None:
        config, counts = self._config, self._config.cluster
        envs, rollouts = await asyncio.gather(
            self._cluster.launch(
                EnvWorker,
                config.env,
                actor_ranks=counts.actors,
                count=counts.env_workers,
                name="Env",
                restart=Restart(max=counts.max_restarts),
                env_vars=counts.environment,
            ),
            self._cluster.launch(
                RolloutWorker,
                config.actor.fsdp.policy,
                config.rollout,
                count=counts.rollout_workers,
                name="Rollout",
                restart=Restart(max=counts.max_restarts),
                env_vars=counts.environment,
            ),
        )
        self._envs: WorkerGroup[EnvWorker] = envs
        self._serving: GroupCall[list[RolloutReport]] = rollouts.call(
            RolloutWorker.serve,
            self._observations.receiver,
            self._actions.sender,
            self._ways.weights.receiver,
        )

    def serving(self) -> AbstractContextManager[object]:
        ends = ExitStack()
        ends.enter_context(self._observations.sender)
        ends.enter_context(self._actions.receiver)
        return ends

    def collect(self) -> GroupCall[list[EnvReport]]:
        return self._envs.call(
            EnvWorker.collect,
            self._ways.tickets.receiver,
            self._observations.sender,
            self._actions.receiver,
            self._ways.trajectories.sender,
        )

    async def evaluate(self, plan: EvaluationPlan) -> list[EvaluatedEpisode]:
        shares = await self._envs.call(
            EnvWorker.evaluate, plan, self._observations.sender, self._actions.receiver
        )
        return [episode for share in shares for episode in share]

    async def finish(self) -> None:
        await self._serving


class Together:
    """Each env worker runs the policy itself: for environments whose steps are short."""

    def __init__(self, cluster: Cluster, config: EmbodiedConfig, ways: Ways) -> None:
        self._cluster, self._config, self._ways = cluster, config, ways

    async def launch(self) -> None:
        config, counts = self._config, self._config.cluster
        self._envs: WorkerGroup[CollocatedEnvWorker] = await self._cluster.launch(
            CollocatedEnvWorker,
            config.env,
            config.actor.fsdp.policy,
            config.rollout,
            actor_ranks=counts.actors,
            count=counts.env_workers,
            name="Env",
            restart=Restart(max=counts.max_restarts),
            env_vars=counts.environment,
        )

    def serving(self) -> AbstractContextManager[object]:
        return nullcontext()

    def collect(self) -> GroupCall[list[EnvReport]]:
        return self._envs.call(
            CollocatedEnvWorker.collect,
            self._ways.tickets.receiver,
            self._ways.trajectories.sender,
            self._ways.weights.receiver,
        )

    async def evaluate(self, plan: EvaluationPlan) -> list[EvaluatedEpisode]:
        shares = await self._envs.call(
            CollocatedEnvWorker.evaluate, plan, self._ways.weights.receiver
        )
        return [episode for share in shares for episode in share]

    async def finish(self) -> None:
        """Nothing runs between two calls."""
