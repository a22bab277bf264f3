"""`CollocatedEnvWorker`: an env worker and a rollout worker in one process, for light environments.

::

    tickets ---> +-------------------- one process -------------------+ ---Trajectory--->
                 |  EnvWorker ---Observations---> RolloutWorker       |
    weights ---> |            <-----Actions------                     |
                 +----------------------------------------------------+

The two workers are the same classes as in two processes, with the same questions and answers; but
a question is a call, which saves some hundred microseconds each way. That is worth it where a step
costs less than that (MuJoCo locomotion: 0.07 ms), and not where a step is long enough to overlap
with the policy.

Both die together; the ticket is delivered again to the restarted worker.
"""

from __future__ import annotations

from typing import Any, ClassVar

from rlinf_async.channels import LatestReceiver, Receiver, Sender
from rlinf_async.messages.embodied import Collect, Intervention, Proposal, Trajectory
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.base import Worker, make
from rlinf_async.workers.env import EnvConfig, EvaluatedEpisode
from rlinf_async.workers.env.worker import EnvReport, EnvWorker, EvaluationPlan
from rlinf_async.workers.rollout.policy import RolloutConfig, RolloutWorker


class CollocatedEnvWorker(Worker):
    """One rank: environments, and the policy that acts in them.

    Args:
        env: the environments of this worker.
        policy: configuration of the policy backend, as its own Struct.
        rollout: how the policy answers.
        actor_ranks: how many actor ranks share the trajectories.
        person_seconds: how long a step waits for a person; None: nobody is asked.
    """

    rollout_type: ClassVar[type[RolloutWorker]] = RolloutWorker
    """the class of the worker that answers; a subclass may bring its own"""

    def __init__(
        self,
        env: EnvConfig,
        policy: Any,
        rollout: RolloutConfig | None = None,
        *,
        actor_ranks: int = 1,
        person_seconds: float | None = None,
    ) -> None:
        own = self._context
        options = {"actor_ranks": actor_ranks, "person_seconds": person_seconds}
        self._env = make(EnvWorker, own, (env,), options)
        self._rollout = make(self.rollout_type, own, (policy, rollout), {})

    async def setup(self) -> None:
        """The policy first: where it cannot be made, no environment is open."""
        await self._rollout.setup()
        await self._env.setup()

    async def teardown(self) -> None:
        """The environments first: they hold what has to be released."""
        try:
            await self._env.teardown()
        finally:
            await self._rollout.teardown()

    async def collect(
        self,
        tickets: Receiver[Collect],
        trajectories: Sender[Trajectory],
        weights: LatestReceiver[WeightUpdate],
        proposals: Sender[Proposal] | None = None,
        interventions: Receiver[Intervention] | None = None,
    ) -> EnvReport:
        """Collect for the tickets under this rank's key until they end. See `EnvWorker.collect`."""
        async with self._rollout.answering(weights) as policy:
            return await self._env.collect_with(
                policy, tickets, trajectories, proposals, interventions
            )

    async def evaluate(
        self,
        plan: EvaluationPlan,
        weights: LatestReceiver[WeightUpdate],
        evaluated: Sender[EvaluatedEpisode] | None = None,
    ) -> list[EvaluatedEpisode]:
        """Run this rank's share of the plan's episodes. See `EnvWorker.evaluate`."""
        async with self._rollout.answering(weights) as policy:
            return await self._env.evaluate_with(policy, plan, evaluated)
