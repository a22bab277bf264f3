"""A policy whose weights change while it answers.

Invariant: a forward pass runs under the weights of one version, the one that its answers name. New
weights are checked, and loaded between two passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlinf_async.backends.base import PolicyBackend
from rlinf_async.channels import EndOfChannel, LatestReceiver
from rlinf_async.channels.waitfor import WaitFuture
from rlinf_async.messages.embodied import Observations
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.pace import Pace
from rlinf_async.workers.rollout.batch import Answered, answer_all
from rlinf_async.workers.rollout.errors import WeightsEnded


class LivePolicy:
    """Answers questions, and takes new weights as they come."""

    def __init__(self, policy: PolicyBackend, pace: Pace) -> None:
        self._policy = policy
        self._pace = pace
        self._waiting: list[WaitFuture] = []
        self._ended = False
        self.loads = 0
        """weight updates that were applied"""

    @property
    def version(self) -> int:
        """The version of the loaded weights; -1 before the first."""
        return self._policy.version

    async def answer(self, questions: Sequence[Observations]) -> Answered:
        """Answer all questions in one forward pass.

        Raises:
            PolicyOutputError: the policy returned NaN or infinity.
        """
        return await self._pace.run("forward", answer_all, self._policy, questions)

    async def follow(self, weights: LatestReceiver[WeightUpdate]) -> None:
        """Load every update that comes, until no more will.

        Raises what the policy's ``load`` raises: `WeightsError` for a damaged update.
        """
        self._ended = False
        seen = 0  # not what the receiver has seen: another rank of this process may hold it too
        try:
            while True:
                update = await weights.get(newer_than=seen)
                seen = weights.version
                await self._pace.run("load weights", self._policy.load, update)
                self.loads += 1
                self._wake()
        except EndOfChannel:
            pass  # what is loaded still answers
        finally:
            self._ended = True
            self._wake()

    async def reach(self, version: int) -> None:
        """Wait until the weights are at least as new as this version.

        Raises:
            WeightsEnded: they never will be.
        """
        while self.version < version:
            if self._ended:
                raise WeightsEnded(
                    f"weights of version {version} are asked for, the newest are {self.version}, "
                    "and their channel has ended: the actor must go on until the env workers are "
                    "done"
                )
            # Only the publisher can end this wait: the deadlock watch tells by the future's type.
            waiting = WaitFuture(loop=asyncio.get_running_loop())
            self._waiting.append(waiting)
            await waiting

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)
