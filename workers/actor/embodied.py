"""`EmbodiedFSDPActor`: trains a robot policy from trajectories and publishes every version of it;
`SacActor`: from batches of a replay worker.

::

    Trajectory --by rank--> [ run_training: collect -> train -> version + 1 ] --> TrainReport
                                                          |
                                                          +--WeightUpdate, `Latest`--> rollout

                          waits for                        unblocked by
    recv_rollout_batch    its share of one iteration       env workers' trajectories
    training              the compute thread               itself
    publishing            nothing: `Latest` never waits

Exactly once: a trajectory of (iteration, env rank, stage, epoch) is trained once. A restarted env
worker may send one again; the second is left out and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from rlinf_async.backends.base import (
    FirstWeights,
    GradientStep,
    OffPolicyTrainer,
    TrainerBackend,
)
from rlinf_async.backends.parts import (
    DEFAULT_OFF_POLICY_TRAINER,
    DEFAULT_TRAINER,
    off_policy_trainers,
    trainers,
)
from rlinf_async.channels import LatestSender, Receiver, Sender
from rlinf_async.messages.embodied import (
    BatchRequest,
    ReplayBatch,
    TrainReport,
    Trajectory,
    all_counts,
    samples_of,
)
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.parallel import StrategyError
from rlinf_async.workers.actor.training import TrainingWorker

Place = tuple[int, int, int]
"""env rank, stage and epoch of a trajectory"""


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of an iteration."""

    trajectories: int
    """number in each iteration, over all ranks and epochs"""
    epochs: int = 1
    """trajectories of a stage in each iteration, which all go to one rank"""
    max_staleness: int = 0
    """versions that the weights of a step may be behind those that are trained"""


class EmbodiedFSDPActor(TrainingWorker[TrainerBackend]):
    """One rank of the actor group; see `TrainingWorker`."""

    parts = trainers
    backend = DEFAULT_TRAINER

    def __init__(
        self,
        trainer: Any,
        *,
        backend: str | None = None,
        resume: str | None = None,
        first: FirstWeights | None = None,
    ) -> None:
        super().__init__(trainer, backend=backend, resume=resume, first=first)
        self._early: dict[int, dict[Place, Trajectory]] = {}
        """trajectories that arrived before their iteration is trained"""
        self.duplicates = 0
        """second trajectories, which were left out"""
        self._reported_duplicates = 0
        self._stages = 0
        """stages that share an iteration, over all env workers; 0 before the first is trained"""

    @classmethod
    def resumes_exactly(cls, arguments: Mapping[str, Any]) -> bool:
        """Unless rewards are normalised: of the returns of episodes that go on, a checkpoint has
        nothing, since environments begin new ones when a run is resumed."""
        return not getattr(arguments.get("trainer"), "normalize_reward", True)

    async def clone(self) -> dict[str, float]:
        """Learn from demonstrations, before the first iteration; returns metrics. On all ranks."""
        with self.span("clone"):
            return dict(await self.compute(self._trainer.clone))

    async def run_training(
        self,
        plan: TrainingPlan,
        trajectories: Receiver[Trajectory],
        weights: LatestSender[WeightUpdate],
    ) -> TrainReport:
        """Train one iteration, and publish the version that comes out.

        Every active rank trains on its own share, taken under its rank as the key; rank 0
        publishes. One call at a time. Call `sync_model_to_rollout` before the first, and hold other
        ends of both channels open between two calls.

        Raises:
            RuntimeError: a trajectory is more than ``plan.max_staleness`` versions old.
            StrategyError: the ranks do not divide the trajectories.
        """
        self._stages = plan.trajectories // plan.epochs
        async with self.training():
            self.check_share(self.active_world_size)
            iteration = self._trainer.version
            batch, metrics, lags = await self._train(trajectories, iteration, plan)
            await self.scheduler_scale_sync()
            await self.sync_model_to_rollout(weights)
        return self._report(iteration, batch, metrics, lags)

    async def _train(
        self, trajectories: Receiver[Trajectory], iteration: int, plan: TrainingPlan
    ) -> tuple[list[Trajectory], Mapping[str, float], tuple[float, int]]:
        """Train the share of this rank; an idle rank only counts the iteration."""
        if not self.active:
            await self.compute(self.rescalable().skip_iteration)
            return [], {}, (0.0, 0)
        batch = await self.recv_rollout_batch(trajectories, iteration, plan)
        lags = self._checked_lags(batch, plan.max_staleness)
        with self.span("train", iteration=iteration):
            return batch, await self.compute(self._trainer.train, batch), lags

    async def recv_rollout_batch(
        self, trajectories: Receiver[Trajectory], iteration: int, plan: TrainingPlan
    ) -> list[Trajectory]:
        """Exactly this rank's share of one iteration, in the order of env rank, stage and epoch.

        Epochs are folded into the batch: each is a trajectory like those of other stages, and its
        envs are columns beside theirs. What is masked after the end of an episode, is in each by
        itself. Trajectories of later iterations that arrive meanwhile are kept until then.
        """
        share = plan.trajectories // self.active_world_size
        with self.span("wait trajectories", iteration=iteration):
            while len(self._early.get(iteration, {})) < share:
                self._keep(await trajectories.get(key=self.rank), iteration)
        batch = self._early.pop(iteration)
        return [batch[place] for place in sorted(batch)]

    def _keep(self, trajectory: Trajectory, iteration: int) -> None:
        place = (trajectory.env_rank, trajectory.stage, trajectory.epoch)
        late = trajectory.iteration < iteration
        if late or place in self._early.setdefault(trajectory.iteration, {}):
            self.duplicates += 1
            self.log.warning(
                "iteration %d of env worker %d, stage %d, epoch %d came twice and is trained once",
                trajectory.iteration,
                *place,
            )
        else:
            self._early[trajectory.iteration][place] = trajectory

    def _checked_lags(self, batch: list[Trajectory], limit: int) -> tuple[float, int]:
        """Mean and maximum of the versions that each step's weights are behind the trained ones."""
        now = self._trainer.version
        lags = [now - int(version) for one in batch for version in one.version]
        if max(lags) > limit or min(lags) < 0:
            raise RuntimeError(
                f"the trajectories that are trained at version {now} hold steps that are "
                f"{min(lags)} to {max(lags)} versions old, but max_staleness is {limit}: their "
                "tickets were issued too early"
            )
        return sum(lags) / len(lags), max(lags)

    async def sync_model_to_rollout(self, weights: LatestSender[WeightUpdate]) -> int:
        """Publish the present version, from rank 0; returns it. Every rank takes part."""
        with self.span("publish", version=self._trainer.version):
            update = await self.compute(self._trainer.publish)
            if self.rank == 0:
                await weights.publish(update)
        return update.version

    # -- the number of ranks that train -------------------------------------------------------

    def check_share(self, dp: int) -> None:
        """Raise `StrategyError` unless ``dp`` ranks can share the trajectories."""
        if self._stages % dp:
            share = [one for one in range(1, self.world_size + 1) if not self._stages % one]
            raise StrategyError(
                [f"dp={dp} does not divide {self._stages} trajectories; these do: {share}"]
            )

    def objection(self) -> str:
        """Trajectories that are here for later iterations were sent by the old strategy."""
        early = sum(len(batch) for batch in self._early.values())
        if not early:
            return ""
        return (
            f"{early} trajectories of later iterations are on {self.name} already: they were sent "
            "by the old strategy. Send an iteration's trajectories after the strategy was applied"
        )

    def _report(
        self,
        iteration: int,
        batch: list[Trajectory],
        metrics: Mapping[str, float],
        lags: tuple[float, int],
    ) -> TrainReport:
        duplicates = self.duplicates - self._reported_duplicates
        self._reported_duplicates = self.duplicates
        return TrainReport(
            iteration=iteration,
            version=self._trainer.version,
            metrics=dict(metrics),
            env_steps=sum(samples_of(one) for one in batch),
            lag_mean=lags[0],
            lag_max=lags[1],
            duplicates=duplicates,
            episode_return=[value for one in batch for value in one.episode_return],
            episode_length=[value for one in batch for value in one.episode_length],
            episode_success=[value for one in batch for value in one.episode_success],
            episode_level=[value for one in batch for value in one.episode_level],
            ranks=self.active_world_size,
            control=all_counts(one.control for one in batch),
        )


class GradientPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The gradient steps of one iteration."""

    updates: int
    prefetch: int = 4
    """batches that are asked for ahead"""
    priorities: bool = False
    """whether the replay worker wants to know the errors of its transitions"""


class SacReport(msgspec.Struct, kw_only=True):
    """Result of an iteration's gradient steps."""

    version: int
    """version of the published weights"""
    metrics: dict[str, float]
    """means over the gradient steps; empty where there were none"""
    duplicates: int
    """shares of batches that came to this rank twice since the last report"""


class SacActor(TrainingWorker[OffPolicyTrainer]):
    """One rank of the actor group; see `TrainingWorker`.

    ::

        this process --run_training--> [ request ahead -> share -> gradient step ] x updates
                                           |        ^                   |
                              rank 0 only  v        | by rank, bounded  +--WeightUpdate, `Latest`-->
                                         replay worker                    rank 0, once, at the end

                        waits for                        unblocked by
        a batch         the request of rank 0            the replay worker
        the step        the compute thread, all ranks    their shares
        publishing      nothing: `Latest` never waits

    ``prefetch`` requests are under way, so that batches are drawn while this worker computes.
    Batches come in the order of their requests. A replay worker that was restarted may send one
    again, to some ranks or to all: it is left out, and counted. Errors are gathered in each step:
    rank 0 reports the priorities of all.

    Args:
        trainer: configuration of the trainer backend, as its own Struct.
        policy: configuration of the policy, with its spaces.
        backend: name of the trainer backend.
        resume: folder of the checkpoint to go on from.
        first: weights of another run to begin with.
    """

    parts = off_policy_trainers
    backend = DEFAULT_OFF_POLICY_TRAINER

    def __init__(
        self,
        trainer: Any,
        policy: Any,
        *,
        backend: str | None = None,
        resume: str | None = None,
        first: FirstWeights | None = None,
    ) -> None:
        super().__init__(trainer, backend=backend, resume=resume, first=first)
        self._policy_config = policy
        self._indices: list[Any] = []
        self._errors: list[Any] = []
        """errors of batches whose priorities the replay worker does not know yet"""
        self._duplicates = 0

    def make_trainer(self) -> OffPolicyTrainer:
        size, rank = self.world_size, self.rank
        trainer: OffPolicyTrainer = self.part.make(self._config, self._policy_config, size, rank)
        return trainer

    def check_share(self, dp: int) -> None:
        """Raise `StrategyError` for another number of ranks than were launched."""
        if dp != self.world_size:
            raise StrategyError(
                [f"dp={dp}: batches are divided among the {self.world_size} launched ranks"]
            )

    async def run_training(
        self,
        plan: GradientPlan,
        requests: Sender[BatchRequest],
        batches: Receiver[ReplayBatch],
        weights: LatestSender[WeightUpdate],
    ) -> SacReport:
        """Take the gradient steps of one iteration, and publish the version that comes out.

        On all ranks; the share of each comes under its rank as the key.
        """
        iteration = self._trainer.version
        metrics: list[GradientStep] = []
        for number in range(min(plan.prefetch, plan.updates)):
            await self._request(requests, iteration, number)
        with self.span("train", iteration=iteration):
            for number in range(plan.updates):
                batch = await self._receive(batches, iteration, number)
                if number + plan.prefetch < plan.updates:
                    await self._request(requests, iteration, number + plan.prefetch)
                step = await self.compute(self._trainer.step, batch)
                metrics.append(step)
                if plan.priorities and self.rank == 0:
                    self._indices.append(batch.index)
                    self._errors.append(step.error)
        self._trainer.end_iteration()
        version = await self.sync_model_to_rollout(weights)
        duplicates, self._duplicates = self._duplicates, 0
        return SacReport(version=version, metrics=_means(metrics), duplicates=duplicates)

    async def sync_model_to_rollout(self, weights: LatestSender[WeightUpdate]) -> int:
        """Publish the present version, from rank 0; returns it. Every rank takes part."""
        with self.span("publish", version=self._trainer.version):
            update = await self.compute(self._trainer.publish)
            if self.rank == 0:
                await weights.publish(update)
        return update.version

    async def _request(self, requests: Sender[BatchRequest], iteration: int, number: int) -> None:
        """Ask for a batch for all ranks, on rank 0."""
        if self.rank != 0:
            return
        request = BatchRequest(iteration=iteration, number=number)
        if self._indices:
            request.index = np.concatenate(self._indices)
            request.priority = np.concatenate(self._errors)
            self._indices, self._errors = [], []
        await requests.put(request)

    async def _receive(
        self, batches: Receiver[ReplayBatch], iteration: int, number: int
    ) -> ReplayBatch:
        with self.span("wait batch"):
            while True:
                batch = await batches.get(key=self.rank)
                if (batch.iteration, batch.number) == (iteration, number):
                    return batch
                self._duplicates += 1
                self.log.warning(
                    "batch %d of iteration %d came twice and is trained once",
                    batch.number,
                    batch.iteration,
                )


def _means(steps: list[GradientStep]) -> dict[str, float]:
    if not steps:
        return {}
    names = dict.fromkeys(name for one in steps for name in one.metrics)
    means = {
        name: float(np.mean([one.metrics[name] for one in steps if name in one.metrics]))
        for name in names
    }
    return {**means, "updates": float(len(steps))}
