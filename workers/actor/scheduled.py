"""A rank of an actor whose strategy the scheduler changes between two mini-batches.

::

    rank 0          ActorReady --> scheduler --Orders--> rank 0 --Verdict--> other ranks
    all ranks       change together
    all ranks       ActorChanged --> scheduler
    rank 0          DataShare --> dispatcher
    ranks that read samples, in the first of several epochs
                    trained samples --> dispatcher, which gives them out again

                    waits for                             unblocked by
    rank 0          orders for its boundary               the scheduler; `patience`
    another rank    rank 0's verdict on the boundary      rank 0, which trains before it
    a change        all launched ranks                    they follow the same verdict

Rank 0 alone asks: if the scheduler does not answer, all ranks still do the same, and the run goes
on with the strategy that it has.
"""

from __future__ import annotations

import asyncio

from rlinf_async.channels import EndOfChannel, LatestReceiver, LatestSender, Sender
from rlinf_async.messages.language import SampleGroup
from rlinf_async.parallel import Strategy
from rlinf_async.workers.base import Worker
from rlinf_async.workers.scheduler.messages import (
    ActorChanged,
    ActorReady,
    Boundary,
    DataShare,
    Orders,
    SchedulerReport,
    Verdict,
)


class SchedulerLink:
    """One rank's channels to the scheduler and to the other ranks.

    Args:
        worker: the rank.
        orders: the scheduler's.
        reports: to the scheduler.
        verdicts: rank 0's.
        followed: the same, of other ranks.
        shares: to the dispatcher.
        patience: seconds that rank 0 waits for the scheduler.
        again: to the dispatcher: samples that are to be trained in another epoch, too.
    """

    def __init__(
        self,
        worker: Worker,
        orders: LatestReceiver[Orders],
        reports: Sender[SchedulerReport],
        verdicts: LatestSender[Verdict],
        followed: LatestReceiver[Verdict],
        shares: Sender[DataShare],
        patience: float,
        again: Sender[SampleGroup] | None = None,
    ) -> None:
        self._worker = worker
        self.again = again
        self._orders, self._reports = orders, reports
        self._verdicts, self._followed = verdicts, followed
        self._shares = shares
        self._patience = patience
        self._newest: Orders | None = None
        self._verdict: Verdict | None = None
        self._over = False
        self._changed = asyncio.Condition()

    async def listen(self) -> None:
        """Follow the scheduler's orders, or rank 0's verdicts, until no more will come."""
        try:
            await (self._follow_verdicts() if self._worker.rank else self._follow_orders())
        except EndOfChannel:
            pass
        finally:
            self._over = True
            async with self._changed:
                self._changed.notify_all()

    async def _follow_orders(self) -> None:
        seen = 0  # not what the receiver has seen: another rank of this process may hold it too
        while True:
            self._newest = await self._orders.get(newer_than=seen)
            seen = self._orders.version
            self._over = self._newest.over
            async with self._changed:
                self._changed.notify_all()

    async def _follow_verdicts(self) -> None:
        seen = 0
        while True:
            self._verdict = await self._followed.get(newer_than=seen)
            seen = self._followed.version
            async with self._changed:
                self._changed.notify_all()

    async def decided(self, ready: ActorReady) -> Verdict:
        """Return what all ranks do where this rank is, or, on another rank than 0, at the later
        boundary that rank 0 has reached."""
        if self._worker.rank:
            return await self._verdict_on(ready)
        found = await self._ask(ready)
        verdict = Verdict(boundary=ready.boundary, strategy=found)
        await self._verdicts.publish(verdict)
        return verdict

    async def _verdict_on(self, ready: ActorReady) -> Verdict:
        boundary = ready.boundary
        async with self._changed:
            await self._changed.wait_for(lambda: self._over or self._reached(boundary))
        verdict = self._verdict
        if verdict is None or not self._reached(boundary):
            return Verdict(boundary=boundary)
        if verdict.boundary.iteration > boundary.iteration:  # this one has ended, in what it had
            return Verdict(boundary=Boundary(boundary.iteration, ready.mini_batches))
        return verdict

    def _reached(self, boundary: Boundary) -> bool:
        return self._verdict is not None and self._verdict.boundary >= boundary

    async def _ask(self, ready: ActorReady) -> Strategy | None:
        """Say that this actor is ready, again to each new scheduler, and wait for the orders."""
        asked: int | None = None
        try:
            async with asyncio.timeout(self._patience):
                while not self._over:
                    newest = self._newest
                    if newest is not None and newest.boundary == ready.boundary:
                        return newest.strategy
                    if newest is not None and newest.scheduler != asked:
                        asked = newest.scheduler
                        await self._reports.put(ready)
                    await self._newer(newest)
        except TimeoutError:
            self._worker.log.warning(
                "the scheduler did not answer within %g s (iteration %d, %d mini-batches done): "
                "the run goes on with %s",
                self._patience,
                ready.boundary.iteration,
                ready.boundary.done,
                f"dp={ready.strategy.dp}",
            )
        return None

    async def _newer(self, seen: Orders | None) -> None:
        """Wait for other orders than these."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._over or self._newest is not seen)

    async def changed(self, boundary: Boundary, strategy: Strategy, error: str) -> None:
        """Say what came of a change on this rank."""
        if not self._over:
            rank = self._worker.rank
            await self._reports.put(
                ActorChanged(rank=rank, boundary=boundary, strategy=strategy, error=error)
            )

    async def share(self, boundary: Boundary, ranks: int) -> None:
        """Say who trains the next global batch, from rank 0."""
        if not self._worker.rank:
            await self._shares.put(DataShare(boundary=boundary, ranks=ranks))
