"""A rank of an actor whose strategy the scheduler changes between two mini-batches.

::

    rank 0          ActorReady --> scheduler --Orders--> rank 0 --Verdict--> other ranks
    all ranks       change together, or offload and wait, as often as they are told
    all ranks       ActorChanged --> scheduler
    rank 0          DataShare --> dispatcher
    ranks that read samples, in the first of several epochs
                    trained samples --> dispatcher, which gives them out again

                    waits for                             unblocked by
    rank 0          orders for its boundary               the scheduler; `patience`
    rank 0, lent    the order to take its devices back    the scheduler
    another rank    rank 0's verdict on the boundary      rank 0, which trains before it
    a change        all launched ranks                    they follow the same verdict

Rank 0 alone asks: if the scheduler does not answer, all ranks still do the same, and the run goes
on with the strategy that it has. An actor that has lent its devices does not take them back by
itself: others hold them.
"""

from __future__ import annotations

import asyncio

import msgspec

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
from rlinf_async.workers.scheduler.seen import same_sizes


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
        self._followed_number = 0
        """of the last verdict that this rank has followed, or published"""
        self._asked: tuple[Boundary, int] | None = None
        """boundary at which this rank has said that it is ready, and to which scheduler"""
        self._answered = 0
        """sequence of the last orders that this rank has followed"""
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
        """Return what all ranks do next where this rank is, or, on another rank than 0, at the
        later boundary that rank 0 has reached."""
        if self._worker.rank:
            return await self._verdict_on(ready)
        orders = await self._ask(ready)
        self._followed_number += 1
        verdict = Verdict(
            boundary=ready.boundary, number=self._followed_number, strategy=ready.strategy
        )
        if orders is not None:
            self._answered = orders.sequence
            changed = _new_strategy(orders, ready)
            verdict = msgspec.structs.replace(
                verdict,
                sequence=orders.sequence,
                strategy=changed or ready.strategy,
                holds=orders.holds,
                goes_on=orders.goes_on,
                changes=_changes(orders, ready) or orders.roll_call,
            )
        await self._verdicts.publish(verdict)
        return verdict

    async def _verdict_on(self, ready: ActorReady) -> Verdict:
        boundary = ready.boundary
        async with self._changed:
            await self._changed.wait_for(lambda: self._over or self._is_new(boundary))
        verdict = self._verdict
        if verdict is None or not self._is_new(boundary):
            return Verdict(boundary=boundary)
        if verdict.boundary.iteration > boundary.iteration:  # this one has ended, in what it had
            return Verdict(boundary=Boundary(boundary.iteration, ready.mini_batches))
        self._followed_number = verdict.number
        return verdict

    def _is_new(self, boundary: Boundary) -> bool:
        verdict = self._verdict
        return (
            verdict is not None
            and verdict.boundary >= boundary
            and verdict.number > self._followed_number
        )

    async def _ask(self, ready: ActorReady) -> Orders | None:
        """Say that this actor is ready, once to each scheduler, and return the orders to follow;
        None: there are none, and it goes on."""
        while not self._over:
            newest = self._newest
            if newest is not None and self._is_to_follow(newest, ready):
                return newest
            if newest is not None and self._asked != (ready.boundary, newest.scheduler):
                self._asked = ready.boundary, newest.scheduler
                await self._reports.put(ready)
            try:
                async with asyncio.timeout(self._patience):
                    await self._newer(newest)
            except TimeoutError:
                self._say_that_nobody_answers(ready)
                if ready.holds:
                    return None
        return None

    def _is_to_follow(self, orders: Orders, ready: ActorReady) -> bool:
        if orders.boundary != ready.boundary or orders.sequence <= self._answered:
            return False
        return _changes(orders, ready) or orders.goes_on or orders.roll_call

    def _say_that_nobody_answers(self, ready: ActorReady) -> None:
        self._worker.log.warning(
            "the scheduler did not answer within %g s (iteration %d, %d mini-batches done): %s",
            self._patience,
            ready.boundary.iteration,
            ready.boundary.done,
            f"the run goes on with dp={ready.strategy.dp}"
            if ready.holds
            else "the actor waits on, since others have its devices",
        )

    async def _newer(self, seen: Orders | None) -> None:
        """Wait for other orders than these."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._over or self._newest is not seen)

    async def changed(
        self, verdict: Verdict, strategy: Strategy, *, holds: bool, error: str
    ) -> None:
        """Say what came of a verdict on this rank."""
        if not self._over:
            await self._reports.put(
                ActorChanged(
                    rank=self._worker.rank,
                    boundary=verdict.boundary,
                    sequence=verdict.sequence,
                    strategy=strategy,
                    holds=holds,
                    error=error,
                )
            )

    async def share(self, boundary: Boundary, ranks: int) -> None:
        """Say who trains the next global batch, from rank 0."""
        if not self._worker.rank:
            await self._shares.put(DataShare(boundary=boundary, ranks=ranks))


def _changes(orders: Orders, ready: ActorReady) -> bool:
    return orders.holds != ready.holds or _new_strategy(orders, ready) is not None


def _new_strategy(orders: Orders, ready: ActorReady) -> Strategy | None:
    """Return the strategy that is ordered, where it is not in force."""
    wanted = orders.strategy
    return None if wanted is None or same_sizes(wanted, ready.strategy) else wanted
