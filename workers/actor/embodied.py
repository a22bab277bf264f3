"""`EmbodiedFSDPActor`: trains a robot policy from trajectories and publishes every version of it.

::

                          waits for                        unblocked by
    recv_rollout_batch    its share of one iteration       env workers' trajectories
    training              the compute thread               itself
    publishing            nothing: `Latest` never waits
    a checkpoint          the one before; the last one itself

Exactly once: a trajectory of (iteration, env rank, stage) is trained once. A restarted env worker
may send one again; the second is left out and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rlinf_async.backends.base import Rescalable
from rlinf_async.channels import LatestSender, Receiver, Sender
from rlinf_async.messages.embodied import TrainReport, Trajectory
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.observe.files import explaining
from rlinf_async.parallel import StrategyError
from rlinf_async.workers.actor.rescaling import Rescaling, as_rescalable

if TYPE_CHECKING:
    from rlinf_async.backends.base import TrainerBackend


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How long to train, and what to keep."""

    iterations: int
    """in all, those before a resume included"""
    trajectories: int
    """of each iteration, over all ranks"""
    max_staleness: int = 0
    checkpoint_every: int = 0
    """iterations; 0: only after the last"""
    checkpoints: str | None = None
    """the folder they go into; None: none are written"""


class _Saves(NamedTuple):
    """Folders of checkpoints."""

    begun: str | None = None
    written: str | None = None


class EmbodiedFSDPActor(Rescaling):
    """One rank of the actor group.

    Args:
        trainer: configuration of the trainer backend, as plain data or its own Struct.
        backend: its registered name.
        resume: folder of the checkpoint to go on from.
    """

    def __init__(self, trainer: Any, *, backend: str = "fsdp", resume: str | None = None) -> None:
        self._config = trainer
        self._backend_name = backend
        self._resume = resume
        self._early: dict[int, dict[tuple[int, int], Trajectory]] = {}
        self.duplicates = 0
        """second trajectories that were left out"""
        self._reported = 0
        self._trajectories = 0
        """of each iteration, over all ranks; 0 before training"""
        self._flight: Future[Path] | None = None
        self._saving = Path()

    async def setup(self) -> None:
        if self.world_size > 1:
            await self.join_collective()
        self._trainer: TrainerBackend = await self.compute(self._build)
        if self._resume is not None:
            await self.compute(self._trainer.load_checkpoint, Path(self._resume))

    def _build(self) -> TrainerBackend:
        from rlinf_async.backends.registry import load_trainer_backend

        return load_trainer_backend(self._backend_name)(self._config, self.world_size, self.rank)

    async def version(self) -> int:
        """How many iterations the loaded policy was trained for."""
        return self._trainer.version

    async def run_training(
        self,
        plan: TrainingPlan,
        trajectories: Receiver[Trajectory],
        weights: LatestSender[WeightUpdate],
        reports: Sender[TrainReport],
    ) -> int:
        """Publish the present version, then train one iteration after the other.

        Every active rank trains on its own share, taken under its rank as the key; all report, and
        rank 0 publishes. Returns the last version.

        Raises:
            RuntimeError: a trajectory is more than ``plan.max_staleness`` versions old.
            StrategyError: the ranks do not divide the trajectories.
        """
        self._trajectories = plan.trajectories
        async with self.training():
            self._check_trajectories(self.active_world_size)
            await self._publish(weights)
            for iteration in range(self._trainer.version, plan.iterations):
                batch, metrics, lags = await self._train(trajectories, iteration, plan)
                await self.scheduler_scale_sync()
                await self._publish(weights)
                saves = await self._save(plan)
                await reports.put(self._report(iteration, batch, metrics, lags, saves))
        return self._trainer.version

    async def _train(
        self, trajectories: Receiver[Trajectory], iteration: int, plan: TrainingPlan
    ) -> tuple[list[Trajectory], Mapping[str, float], tuple[float, int]]:
        """One iteration; an idle rank has no part in it."""
        if not self.active:
            await self.compute(self.rescalable().sit_out)
            return [], {}, (0.0, 0)
        batch = await self.recv_rollout_batch(trajectories, iteration, plan)
        lags = self._lags(batch, plan.max_staleness)
        with self.span("train", iteration=iteration):
            return batch, await self.compute(self._trainer.train, batch), lags

    def rescalable(self) -> Rescalable:
        """The trainer; raises `StrategyError` where its backend cannot change its ranks."""
        return as_rescalable(self._trainer, self._backend_name)

    def check_share(self, dp: int) -> None:
        """Raise `StrategyError` unless ``dp`` ranks can share minibatches and trajectories."""
        self.rescalable().check_ranks(dp)
        self._check_trajectories(dp)

    def _check_trajectories(self, dp: int) -> None:
        if self._trajectories % dp:
            share = [one for one in range(1, self.world_size + 1) if not self._trajectories % one]
            raise StrategyError(
                [f"dp={dp} does not divide {self._trajectories} trajectories; these do: {share}"]
            )

    def take_share(self, dp: int) -> None:
        """The trainer cuts its minibatches itself."""

    def objection(self) -> str:
        """Trajectories that are here for later iterations lie where the old strategy wants them."""
        early = sum(len(batch) for batch in self._early.values())
        if not early:
            return ""
        return (
            f"{early} trajectories of later iterations are on {self.name} already: they were sent "
            "by the old strategy. Send an iteration's trajectories after the strategy was applied"
        )

    async def recv_rollout_batch(
        self, trajectories: Receiver[Trajectory], iteration: int, plan: TrainingPlan
    ) -> list[Trajectory]:
        """Exactly this rank's share of one iteration, in the order of env rank and stage.

        Trajectories of later iterations that arrive meanwhile are kept for their turn.
        """
        share = plan.trajectories // self.active_world_size
        with self.span("wait trajectories", iteration=iteration):
            while len(self._early.get(iteration, {})) < share:
                self._keep(await trajectories.get(key=self.rank), iteration)
        batch = self._early.pop(iteration)
        return [batch[place] for place in sorted(batch)]

    def _keep(self, trajectory: Trajectory, iteration: int) -> None:
        place = (trajectory.env_rank, trajectory.stage)
        late = trajectory.iteration < iteration
        if late or place in self._early.setdefault(trajectory.iteration, {}):
            self.duplicates += 1
            self.log.warning(
                "iteration %d of env worker %d, stage %d came twice and is trained once",
                trajectory.iteration,
                *place,
            )
        else:
            self._early[trajectory.iteration][place] = trajectory

    def _lags(self, batch: list[Trajectory], limit: int) -> tuple[float, int]:
        """Mean and maximum of the versions that each step's weights are behind the trained ones."""
        now = self._trainer.version
        lags = [now - int(version) for one in batch for version in one.version]
        if max(lags) > limit or min(lags) < 0:
            raise RuntimeError(
                f"what is trained at version {now} holds steps that are {min(lags)} to "
                f"{max(lags)} versions old, but max_staleness is {limit}: tickets came too early"
            )
        return sum(lags) / len(lags), max(lags)

    async def _publish(self, weights: LatestSender[WeightUpdate]) -> None:
        with self.span("publish", version=self._trainer.version):
            update = await self.compute(self._trainer.publish)
            if self.rank == 0:
                await weights.publish(update)

    async def _save(self, plan: TrainingPlan) -> _Saves:
        """Begin a checkpoint where one is due; say which one has been written meanwhile.

        The last one is waited for.
        """
        version = self._trainer.version
        last = version == plan.iterations
        due = plan.checkpoint_every > 0 and version % plan.checkpoint_every == 0
        saves = _Saves()
        if plan.checkpoints is not None and (due or last):
            saves = _Saves(written=await self._written())
            path = Path(plan.checkpoints) / f"version-{version:06d}"
            with self.span("checkpoint", version=version), explaining("write the checkpoint", path):
                self._flight = await self.compute(self._trainer.begin_checkpoint, path)
            self._saving = path
            saves = saves._replace(begun=str(path))
        if self._flight is not None and (last or self._flight.done()):
            saves = saves._replace(written=await self._written())
        return saves

    async def _written(self) -> str | None:
        """Wait for the checkpoint in flight; its folder."""
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        with explaining("write the checkpoint", self._saving):
            await asyncio.wrap_future(flight)
        return str(self._saving)

    async def teardown(self) -> None:
        """Let a checkpoint that is being written become complete."""
        if self._flight is not None:
            await asyncio.gather(asyncio.wrap_future(self._flight), return_exceptions=True)

    def _report(
        self,
        iteration: int,
        batch: list[Trajectory],
        metrics: Mapping[str, float],
        lags: tuple[float, int],
        saves: _Saves,
    ) -> TrainReport:
        duplicates, self._reported = self.duplicates - self._reported, self.duplicates
        return TrainReport(
            iteration=iteration,
            version=self._trainer.version,
            metrics=dict(metrics),
            env_steps=sum(one.reward.size for one in batch),
            lag_mean=lags[0],
            lag_max=lags[1],
            duplicates=duplicates,
            episode_return=[value for one in batch for value in one.episode_return],
            episode_length=[value for one in batch for value in one.episode_length],
            episode_success=[value for one in batch for value in one.episode_success],
            saving=saves.begun,
            checkpoint=saves.written,
            ranks=self.active_world_size,
        )
