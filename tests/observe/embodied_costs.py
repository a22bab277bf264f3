"""Embodied runs in virtual time: real env and rollout workers, over environments and policies that
take time and do nothing else."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, Self

import msgspec
import numpy as np

from rlinf_async.backends.base import PolicyAnswer, PolicyBackend
from rlinf_async.channels import Channel, Latest, LatestSender, Receiver, Sender
from rlinf_async.deadlines import let_pass
from rlinf_async.messages.embodied import (
    Actions,
    Choice,
    Collect,
    Ints,
    Level,
    Observations,
    Trajectory,
)
from rlinf_async.messages.spaces import ObservationArray
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.observe.bottleneck import Advice
from rlinf_async.observe.waits import Facts, WaitsRecord
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.waits import WaitsRecorder
from rlinf_async.testing import VirtualLoop, run_on
from rlinf_async.workers.base import Worker
from rlinf_async.workers.env import EnvConfig, EnvWorker
from rlinf_async.workers.env.stage import StageOutcome
from rlinf_async.workers.rollout.policy import RolloutConfig, RolloutWorker

ITERATIONS = 8
ENVS = 4
"""environments of a stage"""


class EmbodiedCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of an embodied run, and the seconds that their work takes."""

    envs: int
    rollouts: int
    actors: int
    steps: int
    """steps of each env worker in an iteration"""
    max_staleness: int
    step_seconds: float
    forward_seconds: float
    row_seconds: float
    train_seconds: float
    """of one actor, for a whole iteration"""

    @classmethod
    def drawn(cls, rng: random.Random) -> Self:
        """Return a run whose roles need about equally long."""
        envs, rollouts = rng.choice([2, 3, 4, 6, 8]), rng.choice([1, 2])
        steps = rng.choice([16, 24, 32])
        forward = rng.uniform(6.0, 12.0) / steps
        return cls(
            envs=envs,
            rollouts=rollouts,
            actors=rng.choice([1, 2]),
            steps=steps,
            max_staleness=rng.choice([0, 1, 2]),
            step_seconds=rng.uniform(6.0, 12.0) / steps,
            forward_seconds=forward * 0.5,
            row_seconds=forward * 0.5 * rollouts / (envs * ENVS),
            train_seconds=rng.uniform(8.0, 20.0),
        )

    @property
    def roles(self) -> list[str]:
        """The roles that can be slowed."""
        return ["env", "rollout", "actor"]

    def slower(self, role: str, factor: float) -> Self:
        """The same run, with one role slowed."""
        replace = msgspec.structs.replace
        if role == "env":
            return replace(self, step_seconds=self.step_seconds * factor)
        if role == "actor":
            return replace(self, train_seconds=self.train_seconds * factor)
        return replace(
            self,
            forward_seconds=self.forward_seconds * factor,
            row_seconds=self.row_seconds * factor,
        )

    def followed(self, advice: Advice) -> Self:
        """The same run, with the advice followed: as many steps in all."""
        replace = msgspec.structs.replace
        if advice.max_staleness is not None:
            return replace(self, max_staleness=advice.max_staleness)
        if advice.role == "env":
            envs = self.envs + advice.more
            return replace(self, envs=envs, steps=max(1, round(self.steps * self.envs / envs)))
        if advice.role == "actor":
            actors = self.actors + advice.more
            seconds = self.train_seconds * self.actors / actors
            return replace(self, actors=actors, train_seconds=seconds)
        return replace(self, rollouts=self.rollouts + advice.more)


class CostStage:
    """Environments whose steps take time."""

    in_flight = 0
    needs_reset = False

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.rows: Ints | None = None
        self.observation: ObservationArray = np.zeros((ENVS, 2), np.float32)

    def reset(self) -> None:
        """Nothing to do."""

    def step(self, answer: Choice | None, rows: Ints | None = None) -> StageOutcome:
        """Take the time of a step."""
        let_pass(self._seconds)
        no = np.zeros(ENVS, np.bool_)
        return StageOutcome(
            reward=np.zeros(ENVS, np.float32),
            terminated=no,
            truncated=no,
            final_observation=None,
            episodes=[],
        )

    def take_level(self, level: Level) -> None:
        """Its episodes are all alike."""

    def judge(self, env: int, *, success: bool) -> None:
        """Nobody judges them."""

    def pause(self, rows: Ints | None = None) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class CostEnvs(EnvWorker):
    """An env worker over `CostStage`."""

    def __init__(self, seconds: float, actors: int) -> None:
        super().__init__(EnvConfig(id="costs", envs=ENVS, stages=1), actor_ranks=actors)
        self._stages = [CostStage(seconds)]

    async def setup(self) -> None:
        """The stage is there."""

    async def teardown(self) -> None:
        """Nothing to close."""


class CostPolicy:
    """A policy whose passes take time."""

    def __init__(self, costs: EmbodiedCosts) -> None:
        self._costs, self.version = costs, -1

    def load(self, update: WeightUpdate) -> None:
        """Take the version."""
        self.version = update.version

    def act(self, observation: Any) -> PolicyAnswer:
        """Take the time of a pass."""
        self._pass(len(observation))
        rows = np.zeros(len(observation), np.float32)
        return PolicyAnswer(np.zeros((len(rows), 1), np.float32), rows, rows)

    def mode(self, observation: Any) -> Any:
        """Take the time of a pass."""
        return self.act(observation).action

    def value(self, observation: Any) -> Any:
        """Take the time of a pass."""
        return self.act(observation).value

    def _pass(self, rows: int) -> None:
        let_pass(self._costs.forward_seconds + rows * self._costs.row_seconds)


class CostRollout(RolloutWorker):
    """A rollout worker over `CostPolicy`."""

    def __init__(self, costs: EmbodiedCosts) -> None:
        super().__init__(None, RolloutConfig())
        self._costs = costs

    def make_policy(self) -> PolicyBackend:
        return CostPolicy(self._costs)


class CostActor(Worker):
    """One rank of the actors: takes its share of the trajectories, lets the time of training pass,
    and publishes."""

    def __init__(self) -> None:
        self._here = Counter[int]()

    async def train(
        self,
        iteration: int,
        share: int,
        seconds: float,
        trajectories: Receiver[Trajectory],
        weights: LatestSender[WeightUpdate],
    ) -> int:
        """Train one iteration."""
        with self.span("wait trajectories", iteration=iteration):
            while self._here[iteration] < share:  # env workers may be ahead
                self._here[(await trajectories.get(key=self.rank)).iteration] += 1
        with self.span("train", iteration=iteration):
            await asyncio.sleep(seconds)
        if not self.rank:
            await self.publish(iteration + 1, weights)
        return iteration + 1

    async def publish(self, version: int, weights: LatestSender[WeightUpdate]) -> int:
        """Publish a version."""
        return await weights.publish(WeightUpdate(version, (), version))


def simulate_embodied(costs: EmbodiedCosts) -> list[WaitsRecord]:
    """Return the records of a run."""
    return run_on(VirtualLoop(None, max_steps=None, trace_lines=0), _run(costs))


async def _run(costs: EmbodiedCosts) -> list[WaitsRecord]:
    records: list[WaitsRecord] = []
    facts = Facts(
        kind="embodied",
        samples=costs.envs,
        max_staleness=costs.max_staleness,
        steps=costs.steps,
    )
    async with Cluster.local(deadlock_after=None) as cluster:
        envs = await cluster.launch(
            CostEnvs, costs.step_seconds, costs.actors, count=costs.envs, name="env"
        )
        rollouts = await cluster.launch(CostRollout, costs, count=costs.rollouts, name="rollout")
        actors = await cluster.launch(CostActor, count=costs.actors, name="actor")
        room = 4 * costs.envs
        tickets = cluster.channel(Collect, name="tickets", capacity=room)
        questions = cluster.channel(Observations, name="observations", capacity=ENVS * room)
        answers = cluster.channel(Actions, name="actions", capacity=room)
        made: Channel[Trajectory] = cluster.channel(Trajectory, name="trajectories", capacity=room)
        weights: Latest[WeightUpdate] = cluster.latest(WeightUpdate, name="weights")
        serving = rollouts.call(
            CostRollout.serve, questions.receiver, answers.sender, weights.receiver
        )
        collecting = envs.call(
            CostEnvs.collect, tickets.receiver, questions.sender, answers.receiver, made.sender
        )
        recorder = WaitsRecorder(cluster, lambda: facts, records.append, cores=False)
        with made.receiver, tickets.sender as issuing:
            await actors.call_on([0], CostActor.publish, 0, weights.sender)
            recorder.begin(0)
            for iteration in range(costs.max_staleness + 1):
                await _issue(costs, issuing, iteration)
            for iteration in range(ITERATIONS):
                await _trained(costs, actors, iteration, made, weights)
                if iteration + costs.max_staleness + 1 < ITERATIONS:
                    await _issue(costs, issuing, iteration + costs.max_staleness + 1)
                recorder.boundary(iteration + 1)
            await recorder.finish(ITERATIONS)
        await collecting
        weights.sender.close()
        await serving
    return records


async def _trained(
    costs: EmbodiedCosts,
    actors: Any,
    iteration: int,
    made: Channel[Trajectory],
    weights: Latest[WeightUpdate],
) -> None:
    shares = [
        costs.envs // costs.actors + (rank < costs.envs % costs.actors)
        for rank in range(costs.actors)
    ]
    calls = [
        actors.call_on(
            [rank], CostActor.train, iteration, share, costs.train_seconds / costs.actors,
            made.receiver, weights.sender,
        )
        for rank, share in enumerate(shares)
    ]  # fmt: skip
    for call in calls:
        await call


async def _issue(costs: EmbodiedCosts, tickets: Sender[Collect], iteration: int) -> None:
    least = max(0, iteration - costs.max_staleness)
    for rank in range(costs.envs):
        await tickets.put(
            Collect(iteration=iteration, steps=costs.steps, min_version=least), key=rank
        )
