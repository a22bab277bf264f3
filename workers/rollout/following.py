"""Weights of a model that serves requests: updates are loaded as they come, and waited for.

::

              waits for                        unblocked by
    follow    newer weights                    the actor
    reach     weights of a version, loaded     follow
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rlinf_async.channels import EndOfChannel, LatestReceiver
from rlinf_async.channels.waitfor import WaitFuture
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.rollout.errors import WeightsEnded


class FollowedWeights:
    """Which weights a model has, while newer ones are loaded beside its work.

    Args:
        version: returns the version of the loaded weights; -1 before the first.
        askers: the workers that ask for versions, for errors.
    """

    def __init__(self, version: Callable[[], int], askers: str) -> None:
        self._version = version
        self._askers = askers
        self._waiting: list[WaitFuture] = []
        self._ended = False
        self.loads = 0
        """weight updates that were applied"""
        self.interrupted: frozenset[str] = frozenset()
        """names of the requests for which `reach` does not wait"""

    def begin(self) -> None:
        """Expect updates again: `follow` is about to begin."""
        self._ended = False

    async def follow(
        self,
        weights: LatestReceiver[WeightUpdate],
        load: Callable[[WeightUpdate], Awaitable[None]],
    ) -> None:
        """Hand every update that comes to ``load``, which calls `loaded`, until no more will come.

        Raises what ``load`` raises: `WeightsError` for a damaged update.
        """
        self.begin()
        seen = 0  # not what the receiver has seen: another rank of this process may hold it too
        try:
            while True:
                update = await weights.get(newer_than=seen)
                seen = weights.version
                await load(update)
        except EndOfChannel:
            pass  # the loaded weights still serve
        finally:
            self._ended = True
            self.wake()

    def loaded(self) -> None:
        """Count an update that was applied, and wake those that wait for its version."""
        self.loads += 1
        self.wake()

    async def reach(self, version: int, name: str = "") -> None:
        """Wait until the weights are at least as new as this version, or until `interrupt` names
        this request.

        Raises:
            WeightsEnded: they never will be.
        """
        while self._version() < version and name not in self.interrupted:
            if self._ended:
                raise WeightsEnded(
                    f"weights of version {version} are asked for, the newest are "
                    f"{self._version()}, and their channel has ended: the actor must go on until "
                    f"the {self._askers} are done"
                )
            # Only the publisher can end this wait: the deadlock watch tells by the future's type.
            waiting = WaitFuture(loop=asyncio.get_running_loop())
            self._waiting.append(waiting)
            await waiting

    def interrupt(self, names: frozenset[str]) -> None:
        """End every `reach` of these requests."""
        self.interrupted = names
        self.wake()

    def wake(self) -> None:
        """Have every `reach` look at the version again."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)
