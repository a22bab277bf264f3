"""`SacActor`: learns from batches of a replay worker, and publishes every version of its policy.

::

    this process --run_training--> [ request ahead -> share -> gradient step ] x updates
                                       |        ^                   |
                          rank 0 only  v        | by rank, bounded  +--WeightUpdate, `Latest`-->
                                     replay worker                    rank 0, once, at the end

                    waits for                        unblocked by
    a batch         the request of rank 0            the replay worker
    the step        the compute thread, all ranks    their shares
    publishing      nothing: `Latest` never waits

``prefetch`` requests are under way, so that batches are drawn while this worker computes. Batches
come in the order of their requests. A replay worker that was restarted may send one again, to some
ranks or to all: it is left out, and counted. Errors are gathered in each step: rank 0 reports the
priorities of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rlinf_async.backends.base import GradientStep, OffPolicyTrainer
from rlinf_async.channels import LatestSender, Receiver, Sender
from rlinf_async.messages.replay import BatchRequest, ReplayBatch
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.parallel import StrategyError
from rlinf_async.workers.actor.training_worker import TrainingWorker


class GradientPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The gradient steps of one iteration."""

    updates: int
    prefetch: int = 4
    """batches that are asked for ahead"""
    priorities: bool = False
    """whether the replay worker wants to know the errors of its transitions"""


class SacReport(msgspec.Struct, kw_only=True):
    """What an iteration's gradient steps came to."""

    version: int
    """of the published weights"""
    metrics: dict[str, float]
    """means over the gradient steps; empty where there were none"""
    duplicates: int
    """shares of batches that came to this rank twice since the last report"""


class SacActor(TrainingWorker[OffPolicyTrainer]):
    """One rank of the actor group; see `TrainingWorker`.

    Args:
        trainer: configuration of the trainer backend, as its own Struct.
        policy: configuration of the policy, with its spaces.
        backend: name of the trainer backend.
        resume: folder of the checkpoint to go on from.
    """

    def __init__(
        self, trainer: Any, policy: Any, *, backend: str = "sac", resume: str | None = None
    ) -> None:
        super().__init__(trainer, backend=backend, resume=resume)
        self._policy_config = policy
        self._indices: list[Any] = []
        self._errors: list[Any] = []
        """of batches whose priorities the replay worker does not know yet"""
        self._duplicates = 0

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        from rlinf_async.backends.registry import OFF_POLICY_TRAINERS, slow_imports

        return slow_imports(OFF_POLICY_TRAINERS, arguments.get("backend"))

    def make_trainer(self) -> OffPolicyTrainer:
        from rlinf_async.backends.registry import load_off_policy_trainer

        return load_off_policy_trainer(self._backend_name)(
            self._config, self._policy_config, self.world_size, self.rank
        )

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
    means = {
        name: float(np.mean([one.metrics[name] for one in steps])) for name in steps[0].metrics
    }
    return {**means, "updates": float(len(steps))}
