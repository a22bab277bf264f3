"""A trainer that records what it is given, and trajectories that say what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

import rlinf_async as ra
from rlinf_async.backends.base import RescaleReport
from rlinf_async.channels import LatestReceiver
from rlinf_async.messages.embodied import TrainReport, Trajectory
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.parallel import Strategy
from rlinf_async.workers.actor import EmbodiedFSDPActor, TrainingPlan

Place = tuple[int, int, int]
"""iteration, env rank, stage"""

STEPS, ENVS = 3, 2


class ToyTrainer:
    """A `TrainerBackend` without torch. ``made`` has all of them since the list was cleared."""

    collective: ClassVar[bool] = False
    made: ClassVar[list[ToyTrainer]] = []

    def __init__(self, config: Any, world_size: int, rank: int) -> None:
        self.rank = rank
        self.version = 0
        self.trained: list[list[Place]] = []
        self.saved: list[str] = []
        self.made.append(self)

    def train(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        self.trained.append([(one.iteration, one.env_rank, one.stage) for one in trajectories])
        self.version += 1
        return {"loss": float(self.version)}

    def publish(self) -> WeightUpdate:
        return WeightUpdate(self.version, (), 0)

    def save_checkpoint(self, path: Path) -> None:
        self.saved.append(path.name)

    def begin_checkpoint(self, path: Path) -> Future[Path]:
        self.save_checkpoint(path)
        done: Future[Path] = Future()
        done.set_result(path)
        return done

    def load_checkpoint(self, path: Path) -> None:
        self.version = int(path.name.removeprefix("version-"))


def nothing_moved(old: int, new: int, *, active: bool = True) -> RescaleReport:
    """What a toy says that changes its ranks by doing nothing."""
    return RescaleReport(
        old_strategy=Strategy(dp=old),
        new_strategy=Strategy(dp=new),
        active=active,
        seconds=0.0,
        sent_bytes=0,
        received_bytes=0,
        peak_bytes=0,
        kept_bytes=0,
        extras=(),
    )


class ToyActor(EmbodiedFSDPActor):
    """An actor over `ToyTrainer`, which has no collectives to join."""

    async def join_collective(self) -> None:
        pass

    async def scheduler_scale_sync(self) -> None:
        """Nothing: there is no group whose store says which strategies are due."""


class Plan(NamedTuple):
    """What a run is made of."""

    iterations: int
    trajectories: int
    max_staleness: int = 0

    @property
    def each(self) -> TrainingPlan:
        """Of one iteration."""
        return TrainingPlan(trajectories=self.trajectories, max_staleness=self.max_staleness)


class Channels:
    """The channels around the actors."""

    def __init__(self, cluster: ra.Cluster) -> None:
        self.trajectories = cluster.channel(Trajectory, name="trajectories", capacity=4)
        self.weights = cluster.latest(WeightUpdate, name="weights")

    def iteration(self, actors: ra.WorkerGroup[Any], plan: Plan) -> ra.GroupCall[list[TrainReport]]:
        """Train the next iteration; one report of each rank."""
        return actors.call(
            EmbodiedFSDPActor.run_training,
            plan.each,
            self.trajectories.receiver,
            self.weights.sender,
        )

    async def train(self, actors: ra.WorkerGroup[Any], plan: Plan) -> list[TrainReport]:
        """Publish, then train one iteration after the other; the reports of all ranks."""
        reports: list[TrainReport] = []
        # A call closes its ends: this one keeps the channel from ending between two of them.
        with self.trajectories.receiver.clone("between two calls"):
            versions = await actors.call(
                EmbodiedFSDPActor.sync_model_to_rollout, self.weights.sender
            )
            for _ in range(versions[0], plan.iterations):
                reports += await self.iteration(actors, plan)
        return reports


def trajectory(iteration: int, env_rank: int = 0, stage: int = 0, version: int = 0) -> Trajectory:
    """One whose every step was acted under ``version``, with one episode that ended."""
    shape = (STEPS, ENVS)
    zeros = np.zeros(shape, np.float32)
    return Trajectory(
        iteration=iteration,
        env_rank=env_rank,
        stage=stage,
        observation=np.zeros((*shape, 1), np.float32),
        action=np.zeros((*shape, 1), np.float32),
        log_prob=zeros,
        value=np.zeros((STEPS + 1, ENVS), np.float32),
        reward=zeros,
        terminated=np.zeros(shape, np.bool_),
        truncated=np.zeros(shape, np.bool_),
        final_value=zeros,
        version=np.full(STEPS, version, np.int64),
        episode_return=[float(env_rank)],
        episode_length=[STEPS],
        episode_success=[True],
    )


async def env_worker(
    rank: int,
    plan: Plan,
    stages: int,
    actors: int,
    trajectories: ra.Sender[Trajectory],
    weights: LatestReceiver[WeightUpdate],
    twice: bool = False,
) -> None:
    """Collect every iteration as soon as it may be, with the newest weights there are."""
    version = -1
    with trajectories:
        for iteration in range(plan.iterations):
            while version < max(0, iteration - plan.max_staleness):
                version = (await weights.get()).version
            for stage in range(stages):
                made = trajectory(iteration, rank, stage, version)
                for _ in range(2 if twice else 1):
                    await trajectories.put(made, key=(rank * stages + stage) % actors)
