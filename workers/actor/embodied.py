"""`EmbodiedFSDPActor`: trains a robot policy from trajectories and publishes every version of it.

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

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rlinf_async.backends.base import TrainerBackend
from rlinf_async.channels import LatestSender, Receiver
from rlinf_async.messages.embodied import TrainReport, Trajectory, samples_of
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.parallel import StrategyError
from rlinf_async.workers.actor.training_worker import TrainingWorker

Place = tuple[int, int, int]
"""env rank, stage and epoch of a trajectory"""


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an iteration is made of."""

    trajectories: int
    """number in each iteration, over all ranks and epochs"""
    epochs: int = 1
    """trajectories of a stage in each iteration, which all go to one rank"""
    max_staleness: int = 0
    """versions that the weights of a step may be behind those that are trained"""


class EmbodiedFSDPActor(TrainingWorker[TrainerBackend]):
    """One rank of the actor group; see `TrainingWorker`."""

    def __init__(self, trainer: Any, *, backend: str = "fsdp", resume: str | None = None) -> None:
        super().__init__(trainer, backend=backend, resume=resume)
        self._early: dict[int, dict[Place, Trajectory]] = {}
        """trajectories that arrived before their iteration is trained"""
        self.duplicates = 0
        """second trajectories, which were left out"""
        self._reported_duplicates = 0
        self._stages = 0
        """stages that share an iteration, over all env workers; 0 before the first is trained"""

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        from rlinf_async.backends.registry import TRAINERS, slow_imports

        return slow_imports(TRAINERS, arguments.get("backend"))

    def make_trainer(self) -> TrainerBackend:
        from rlinf_async.backends.registry import load_trainer_backend

        return load_trainer_backend(self._backend_name)(self._config, self.world_size, self.rank)

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
            ranks=self.active_world_size,
        )
