"""`ScheduledActor`: its strategy changes between two mini-batches, as the scheduler decides.

::

    rank 0          ActorReady --> scheduler --Orders--> rank 0 --Verdict--> each other rank
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
on with the strategy that it has. A rank follows every verdict, in order: where no all-reduce has
ranks wait for one another, one that is behind trains what it was given. An actor that has lent its
devices does not take them back by itself: others hold them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, ClassVar

import msgspec

from rlinf_async.backends.base import made_by
from rlinf_async.channels import EndOfChannel, LatestReceiver, Receiver, Sender
from rlinf_async.channels.batching import BatchSizes
from rlinf_async.messages.language import Boundary, DataShare, LanguageTrainReport, SampleGroup
from rlinf_async.parallel import Strategy
from rlinf_async.workers.actor.language import LanguageActor, LanguageBatches
from rlinf_async.workers.base import BuildError, Worker
from rlinf_async.workers.scheduler.messages import (
    ActorChanged,
    ActorReady,
    Orders,
    SchedulerReport,
    Verdict,
)
from rlinf_async.workers.scheduler.monitor import same_sizes


class SchedulerLink:
    """One rank's channels to the scheduler and to the other ranks.

    Args:
        worker: the rank.
        orders: the scheduler's.
        reports: to the scheduler.
        verdicts: rank 0's, by the rank that follows it.
        followed: verdicts of rank 0, on other ranks.
        shares: to the dispatcher.
        patience: seconds that rank 0 waits for the scheduler.
        again: to the dispatcher: samples that are to be trained in another epoch, too.
    """

    def __init__(
        self,
        worker: Worker,
        orders: LatestReceiver[Orders],
        reports: Sender[SchedulerReport],
        verdicts: Sender[Verdict],
        followed: Receiver[Verdict],
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
        self._unread: deque[Verdict] = deque()
        """verdicts that this rank has not followed yet"""
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
        self._verdicts.close()  # rank 0's end is the last: then this rank's verdicts have ended
        while True:
            self._unread.append(await self._followed.get(key=self._worker.rank))
            async with self._changed:
                self._changed.notify_all()

    async def decided(self, ready: ActorReady) -> Verdict:
        """Return what all ranks do next where this rank is, or, on another rank than 0, at the
        boundary at which rank 0 has ended the iteration."""
        if self._worker.rank:
            return await self._verdict_on(ready)
        orders = await self._ask(ready)
        verdict = Verdict(boundary=ready.boundary, strategy=ready.strategy)
        if orders is not None:
            self._answered = orders.sequence
            changed = _new_strategy(orders, ready)
            verdict = msgspec.structs.replace(
                verdict,
                sequence=orders.sequence,
                strategy=changed or ready.strategy,
                holds=orders.holds,
                goes_on=orders.goes_on,
                changes=_changes(orders, ready) or orders.ranks_report,
            )
        for rank in range(1, self._worker.world_size):
            await self._verdicts.put(verdict, key=rank)
        return verdict

    async def _verdict_on(self, ready: ActorReady) -> Verdict:
        boundary = ready.boundary
        async with self._changed:
            await self._changed.wait_for(lambda: self._over or self._is_next(boundary))
        if not self._is_next(boundary):
            return Verdict(boundary=boundary)
        if self._unread[0].boundary.iteration > boundary.iteration:  # this one has ended, as it was
            return Verdict(boundary=Boundary(boundary.iteration, ready.mini_batches))
        return self._unread.popleft()

    def _is_next(self, boundary: Boundary) -> bool:
        """Whether there is a verdict for this boundary or, at the end of an iteration, a later
        one."""
        while self._unread and self._unread[0].boundary < boundary:
            self._unread.popleft()
        return bool(self._unread)

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
                self._warn_of_no_answer(ready)
                if ready.holds:
                    return None
        return None

    def _is_to_follow(self, orders: Orders, ready: ActorReady) -> bool:
        if orders.boundary != ready.boundary or orders.sequence <= self._answered:
            return False
        return _changes(orders, ready) or orders.goes_on or orders.ranks_report

    def _warn_of_no_answer(self, ready: ActorReady) -> None:
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
        """Wait for orders other than ``seen``."""
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


class ScheduledActor(LanguageActor):
    """One rank of the actor group of a run with a scheduler, over any `LanguageTrainer`.

    The strategy changes between two mini-batches, as the scheduler decides, so samples are
    dispatched for one global batch after the other. `follow_scheduler` has to be called beside the
    calls that train.

    Args:
        trainer: see `LanguageTrainingWorker`.
        batches: sizes of an iteration, over all ranks.
        backend: registered name of the backend.
        resume: folder of the checkpoint to go on from.
        max_staleness: versions that a token's weights may be behind those that are trained.
    """

    collects: ClassVar[bool] = False
    """whether a mini-batch is trained only once all of it is there, so that the strategy may change
    while the actor waits"""
    _link: SchedulerLink = made_by("follow_scheduler()")

    def __init__(
        self,
        trainer: Any,
        batches: LanguageBatches,
        *,
        backend: str | None = None,
        resume: str | None = None,
        max_staleness: int | None = None,
    ) -> None:
        super().__init__(
            trainer, batches, backend=backend, resume=resume, max_staleness=max_staleness
        )
        self._linked = asyncio.Event()
        self._boundary = Boundary(0, 0)
        self._counted = True
        """whether the iteration was counted, trained or not"""
        self._holds = True
        """whether its devices are not lent"""

    # -- training -----------------------------------------------------------------------------

    async def run_training(self, input_channel: Receiver[SampleGroup]) -> LanguageTrainReport:
        """Train on one iteration while its global batches are dispatched, on all launched ranks.

        Raises what `LanguageTrainingWorker.run_training` does.
        """
        await self._linked.wait()
        async with self.training():
            await self.onload()
            iteration, number = self._iteration(), self._trainer.version
            self._boundary, self._counted = Boundary(number, 0), False
            await self.scheduler_pre_process()
            report = await iteration.train_dispatched(input_channel, self)
            if self.done < self._mini_batches:
                await self.at_boundary(self._mini_batches)
            report.ranks = self._trainer.data_rank.size
            return report

    async def run_training_pipeline(
        self, input_channel: Receiver[SampleGroup]
    ) -> LanguageTrainReport:
        """Do what `run_training` does: dispatched samples are always trained while they arrive."""
        return await self.run_training(input_channel)

    async def skip_training(self, input_channel: Receiver[SampleGroup]) -> LanguageTrainReport:
        """Skip an iteration, as `LanguageTrainingWorker.skip_training` does, without asking the
        scheduler who trains."""
        await self._linked.wait()
        for done in range(self._sizes.num_global_batches):
            await self._share(Boundary(self._trainer.version, done))
        iteration = self._iteration()
        if self.active:
            report = await iteration.skip(await iteration.collect(input_channel))
        else:
            await self.compute(self.rescalable().skip_iteration)
            report = iteration.report([], seconds=0.0)
        report.ranks = self._trainer.data_rank.size
        return report

    # -- the scheduler ------------------------------------------------------------------------

    async def follow_scheduler(
        self,
        orders: LatestReceiver[Orders],
        reports: Sender[SchedulerReport],
        verdicts: Sender[Verdict],
        followed: Receiver[Verdict],
        shares: Sender[DataShare],
        patience: float,
        again: Sender[SampleGroup] | None = None,
    ) -> None:
        """Follow a scheduler until its orders end, beside the calls that train. On all ranks.

        Args:
            orders: the scheduler's.
            reports: to the scheduler.
            verdicts: sender of rank 0, for what each other rank does at a boundary, by rank.
            followed: receiver of these verdicts, for the other ranks.
            shares: to whoever dispatches samples: who trains the next global batch.
            patience: seconds that rank 0 waits for orders at a boundary; then nothing changes.
            again: to whoever dispatches samples: those that another epoch trains, too. Needed where
                there are several.
        """
        self._link = SchedulerLink(
            self, orders, reports, verdicts, followed, shares, patience, again
        )
        self._linked.set()
        await self._link.listen()

    async def scheduler_scale_sync(self) -> None:
        """Say that the actor is ready at this boundary, and change to the strategy that is decided
        on, if one is. On all launched ranks.

        Raises `StrategyUnknown` where this rank cannot train on.
        """
        await self._do_as_decided(tokens=0, seconds=0.0)

    async def scheduler_offload_sync(self) -> None:
        """Free the devices for others; the scheduler hears of it from every launched rank, and
        gives them away once all have done so."""
        await super().scheduler_offload_sync()
        self._holds = False

    async def _do_as_decided(self, tokens: int, seconds: float) -> None:
        """Do what is decided here, until it is to go on."""
        goes_on = False
        while not goes_on:
            verdict = await self._link.decided(self._ready(tokens, seconds))
            tokens, seconds, goes_on = 0, 0.0, verdict.goes_on
            self._boundary = verdict.boundary
            if self.done == self._mini_batches:  # rank 0 may have ended it early
                await self.compute(self.end_iteration)
            await self._follow(verdict)
        if self.done < self._mini_batches:
            await self._share(self._boundary)

    def _ready(self, tokens: int, seconds: float) -> ActorReady:
        return ActorReady(
            boundary=self._boundary,
            mini_batches=self._mini_batches,
            epochs=self._batches.epochs,
            strategy=self._changes.strategy,
            tokens=tokens,
            seconds=seconds,
            holds=self._holds,
            collects=self.collects,
        )

    async def _follow(self, verdict: Verdict) -> None:
        error, held, before = "", self._holds, self._changes.strategy
        if not verdict.holds:
            await self.scheduler_offload_sync()
        elif not self._holds:
            self._holds = True
            if self.active:
                await self.onload()
        wanted = verdict.strategy
        if verdict.holds and wanted is not None and not same_sizes(wanted, before):
            error = await self._changes.at_boundary(wanted)
        now = self._changes.strategy
        if verdict.changes or self._holds != held or not same_sizes(now, before):
            await self._link.changed(verdict, now, holds=self._holds, error=error)

    async def _share(self, boundary: Boundary) -> None:
        await self._link.share(boundary, self._trainer.data_rank.size)

    async def at_boundary(self, done: int, tokens: int = 0, seconds: float = 0.0) -> None:
        """Go on as the scheduler decides, after ``done`` mini-batches of the iteration."""
        self._boundary = Boundary(self._boundary.iteration, done)
        await self._do_as_decided(tokens, seconds)

    async def again(self, samples: SampleGroup) -> None:
        """Send trained samples on, which another epoch may give to other ranks."""
        if self._link.again is None:
            raise BuildError(
                f"{self.name} goes {self._batches.epochs} times through its samples: "
                "follow_scheduler() needs a channel `again` to give them out anew"
            )
        await self._link.again.put(samples)

    @property
    def leads(self) -> bool:
        """Whether the other ranks do at a boundary what this one does."""
        return self.rank == 0

    @property
    def done(self) -> int:
        """Mini-batches of the iteration that are trained, over all epochs."""
        return self._boundary.done

    @property
    def _mini_batches(self) -> int:
        return self._sizes.num_global_batches * self._batches.epochs

    @property
    def sizes(self) -> BatchSizes:
        """Batch sizes of this rank, while it trains."""
        return self._sizes

    def end_iteration(self) -> None:
        """Count the iteration, once. Runs in the compute thread."""
        if self._counted:
            return
        self._counted = True
        if self.active:
            self._trainer.end_iteration()
        else:
            self.rescalable().skip_iteration()


def _changes(orders: Orders, ready: ActorReady) -> bool:
    return orders.holds != ready.holds or _new_strategy(orders, ready) is not None


def _new_strategy(orders: Orders, ready: ActorReady) -> Strategy | None:
    """Return the strategy that is ordered, where it is not in force."""
    wanted = orders.strategy
    return None if wanted is None or same_sizes(wanted, ready.strategy) else wanted
