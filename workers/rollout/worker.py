"""`RolloutWorker`: answers the questions of env workers, under the newest weights.

::

    Observations ---lease---> [ whatever is ready, up to max_batch ] ---forward---> Actions, by key
                                     |                    ^
                                     | weights too old    | weights arrived
                                     +----> set aside ----+

                waits for                              unblocked by
    serve       a question                             env workers
    set aside   weights of the version it asks for     the actor
    following   newer weights                          the actor

First ready, first answered: a question that needs weights which are not there yet is set aside and
holds up no other. A forward pass runs under the weights of one version, the one that its answers
name; new weights are loaded between two passes. A question stays leased until it is answered; if
this worker dies before, another one gets it, and if it was answered already the env worker drops
the second answer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from typing import Any

import msgspec
import numpy as np

from rlinf_async.backends.base import PolicyBackend
from rlinf_async.channels import EndOfChannel, LatestReceiver, NoReceivers, Receiver, Sender
from rlinf_async.messages.embodied import Actions, Observations, stage_key
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.base import Worker
from rlinf_async.workers.pace import Pace
from rlinf_async.workers.rollout.batch import answer_all
from rlinf_async.workers.rollout.config import RolloutConfig
from rlinf_async.workers.rollout.following import FollowedWeights
from rlinf_async.workers.tasks import task_group


class RolloutReport(msgspec.Struct, kw_only=True):
    """The counts of one rank's `RolloutWorker.serve`."""

    questions: int = 0
    observations: int = 0
    forwards: int = 0
    set_aside: int = 0
    """questions that had to wait for weights"""
    unwanted: int = 0
    """answers whose env worker had left"""
    weight_updates: int = 0
    version: int = -1
    """version of the weights at the end"""


class RolloutWorker(Worker):
    """One rank of the rollout group.

    Args:
        policy: configuration of the policy backend, as its own Struct.
        config: how this worker answers.
        backend: the policy backend's registered name.
    """

    def __init__(
        self, policy: Any, config: RolloutConfig | None = None, *, backend: str = "torch"
    ) -> None:
        self.config = config or RolloutConfig()
        self._policy_config = policy
        self._backend_name = backend
        self._pace = Pace(self)

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        from rlinf_async.backends.registry import POLICIES, slow_imports

        return slow_imports(POLICIES, arguments.get("backend"))

    async def setup(self) -> None:
        """Build the policy; its weights come with the first update."""
        policy = self._policy = await self.compute(self.make_policy)
        # OpenMP keeps this per thread, and either of the two may run the policy.
        await self.compute(self._limit_threads)
        self._limit_threads()
        self._weights = FollowedWeights(lambda: policy.version, askers="env workers")

    def make_policy(self) -> PolicyBackend:
        """Build the policy. Runs in the compute thread; override it to bring your own."""
        from rlinf_async.backends.registry import load_policy_backend

        parts = (self.config.seed, self.rank, self.incarnation)
        seed = int(np.random.SeedSequence(parts).generate_state(1)[0])
        return load_policy_backend(self._backend_name)(self._policy_config, seed, self.device)

    def _limit_threads(self) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and self.config.torch_threads:
            torch.set_num_threads(self.config.torch_threads)

    async def serve(
        self,
        observations: Receiver[Observations],
        actions: Sender[Actions],
        weights: LatestReceiver[WeightUpdate],
    ) -> RolloutReport:
        """Answer questions until there are no more.

        Raises:
            PolicyOutputError: the policy returned NaN or infinity.
            WeightsError: an update was damaged or does not fit the policy.
            WeightsEnded: the weights that a question asks for will not come.
        """
        report = RolloutReport()
        loads = self._weights.loads
        async with task_group() as group:
            following = group.create_task(self._weights.follow(weights, self._load))
            async with asyncio.TaskGroup() as aside:
                while await self._serve_next(observations, actions, aside, report):
                    pass
            following.cancel()
        report.weight_updates = self._weights.loads - loads
        report.version = self._policy.version
        return report

    async def _load(self, update: WeightUpdate) -> None:
        await self._pace.run("load weights", self._policy.load, update)
        self._weights.loaded()

    async def _serve_next(
        self,
        observations: Receiver[Observations],
        actions: Sender[Actions],
        aside: asyncio.TaskGroup,
        report: RolloutReport,
    ) -> bool:
        """Answer the questions that are ready; return False when no more will come."""
        async with AsyncExitStack() as lease:
            try:
                batch = await lease.enter_async_context(
                    observations.lease(weight=self.config.max_batch, at_least=1)
                )
            except EndOfChannel:
                return False
            version = self._policy.version
            ready = [question for question in batch if question.min_version <= version]
            late = [question for question in batch if question.min_version > version]
            if ready:
                await self._answer(ready, actions, report)
            if late:
                report.set_aside += len(late)
                aside.create_task(self._answer_later(late, lease.pop_all(), actions, report))
        return True

    async def _answer_later(
        self,
        questions: Iterable[Observations],
        lease: AsyncExitStack,
        actions: Sender[Actions],
        report: RolloutReport,
    ) -> None:
        """Answer questions, each as soon as its weights are there, and then end their lease."""
        async with lease:
            by_need = sorted(questions, key=_need)
            for version, group in groupby(by_need, key=_need):
                await self._weights.reach(version)
                await self._answer(list(group), actions, report)

    async def _answer(
        self, questions: list[Observations], actions: Sender[Actions], report: RolloutReport
    ) -> None:
        answered = await self._pace.run("forward", answer_all, self._policy, questions)
        for question, answer in answered:
            try:
                await actions.put(answer, key=stage_key(question.env_rank, question.stage))
            except NoReceivers:  # a question that was delivered again, after the env worker left
                report.unwanted += 1
            report.observations += len(question.observation)
        report.questions += len(questions)
        report.forwards += 1


def _need(question: Observations) -> int:
    return question.min_version
