"""`StrategyChanges`: the number of ranks that train changes while the run goes on.

::

    prepare -> apply, as often as wanted
                 between two calls that train      at once
                 while one trains                  at the end of the iteration

                    waits for                                unblocked by
    apply           the end of the iteration                 training
                    all launched ranks                       they are all asked
    an idle rank    rank 0's list of strategies, at the      rank 0's training
                    end of an iteration

Every rank is asked for the same strategies in the same order. While they train, rank 0 writes after
every iteration which of them are due, so that all ranks change at the same place though the calls
reach them at different times.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from rlinf_async.backends.base import Rescalable, StrategyUnknown
from rlinf_async.parallel import FSDP2, Replicated, Strategy, StrategyError
from rlinf_async.workers.base import Worker
from rlinf_async.workers.collective import GroupStore

LONGEST_POLL = 0.05
"""seconds between two reads of the store"""
DEFAULT_TIMEOUT = 120.0
DEFAULT_BUCKET_BYTES = 16 * 1024 * 1024


class AppliedStrategy(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a strategy on one rank."""

    strategy: Strategy
    old_dp: int
    active: bool
    """this rank trains now; else it is an idle member without memory of the model"""
    seconds: float
    sent_bytes: int
    received_bytes: int


class Sharing(Protocol):
    """How the ranks of a worker share an iteration."""

    def rescalable(self) -> Rescalable:
        """Return the trainer; raises `StrategyError` where its backend cannot change its ranks."""
        ...

    def check_share(self, dp: int) -> None:
        """Raise `ValueError` or `StrategyError` unless ``dp`` ranks can share an iteration."""
        ...

    def take_share(self, dp: int) -> None:
        """Use the batch sizes of one of ``dp`` ranks from the next iteration on."""
        ...

    async def make_ready(self) -> None:
        """Do what this rank has to do before it changes."""
        ...

    def objection(self) -> str:
        """Return why this rank cannot change now; empty where it can."""
        ...


class StrategyChanges:
    """The strategies that one worker was asked for, and what came of them."""

    def __init__(self, worker: Worker, sharing: Sharing) -> None:
        self._worker, self._sharing = worker, sharing
        self._dp = 0
        """number of ranks that train; 0 until it changes: all"""
        self._prepared = False
        self._asked: list[int] = []
        self._outcomes: list[AppliedStrategy | Exception] = []
        """of the first of them"""
        self._changed, self._applying = asyncio.Condition(), asyncio.Lock()
        self._syncs = 0
        """iterations whose due strategies rank 0 has written; the store keeps them, so this is
        never set back"""
        self._training = 0
        """calls that train"""
        self._due_before_training = 0
        """number of strategies that are applied before the first of those calls trains"""
        self._task: asyncio.Task[None] | None = None
        self._timeout = DEFAULT_TIMEOUT
        self._bucket_bytes = DEFAULT_BUCKET_BYTES
        self._unknown: StrategyUnknown | None = None
        """why this rank must not go on"""

    @property
    def active_ranks(self) -> int:
        """Number of ranks that train."""
        return self._dp or self._worker.world_size

    @property
    def strategy(self) -> Strategy:
        """The strategy that is in force."""
        return Strategy(dp=self.active_ranks, sharding=FSDP2())

    async def prepare(self, first: int, timeout: float, bucket_bytes: int) -> list[int]:
        """See `TrainingWorker.init_trainer_resharding`."""
        self._sharing.rescalable()
        if self._training or len(self._outcomes) < len(self._asked):
            fault = "trains or changes its ranks: init_trainer_resharding() must wait"
            raise StrategyError([f"{self._worker.name} {fault}"])
        self._timeout, self._bucket_bytes = timeout, bucket_bytes
        launched = self._worker.world_size
        valid = [dp for dp in range(1, launched + 1) if self._can_share(dp)]
        if not valid:
            self._sharing.check_share(launched)
        self._prepared = True
        first = valid[-1] if first == -1 else first
        self._check(Strategy(dp=first))
        if first != self.active_ranks:
            await self.apply(Strategy(dp=first))
        return valid

    async def apply(self, strategy: Strategy) -> AppliedStrategy:
        """See `TrainingWorker.apply_parallel_strategy`."""
        self._check_known()
        self._check(strategy)
        number = len(self._asked)
        self._asked.append(strategy.dp)
        self._apply_if_due()
        async with self._changed:
            await self._changed.wait_for(lambda: number < len(self._outcomes))
        outcome = self._outcomes[number]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def at_end_of_iteration(self) -> None:
        """Apply the strategies that rank 0 was asked for by now. On all ranks.

        Raises `StrategyUnknown` where this rank cannot train on.
        """
        if not self._prepared or self._worker.world_size == 1:
            return
        store, key = GroupStore("strategy"), str(self._syncs)
        self._syncs += 1
        async with self._applying:
            if self._worker.rank == 0:
                due = self._asked[len(self._outcomes) :]
                await self._worker.compute(store.set, key, msgspec.msgpack.encode(due))
            else:
                due = msgspec.msgpack.decode(await self._read(store, key), type=list[int])
            for dp in due:
                await self._apply(dp)
        self._check_known()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Let strategies wait for the end of an iteration while the block runs."""
        if not self._prepared:
            yield
            return
        self._training += 1
        try:
            if self._training == 1:
                # Requests from before training are so on every rank: they are applied first.
                self._due_before_training = number = len(self._asked)
                async with self._changed:
                    await self._changed.wait_for(lambda: number <= len(self._outcomes))
            self._check_known()
            yield
        finally:
            self._training -= 1
            self._apply_if_due()

    def _apply_if_due(self) -> None:
        """Apply what is due, unless an iteration is trained.

        In a task of its own: the ranks change together, and a call that is cancelled on one of
        them, because it failed on another, must not leave it half changed.
        """
        if self._is_due():
            self._task = asyncio.create_task(self._apply_due())

    def _is_due(self) -> bool:
        due = self._due_before_training if self._training else len(self._asked)
        return len(self._outcomes) < due

    async def _apply_due(self) -> None:
        async with self._applying:
            while self._is_due():
                await self._apply(self._asked[len(self._outcomes)])

    async def _read(self, store: GroupStore, key: str) -> bytes:
        seconds = 0.001
        while (found := await self._worker.compute(store.get, key)) is None:
            await asyncio.sleep(seconds)
            seconds = min(seconds * 1.5, LONGEST_POLL)
        return found

    async def _apply(self, dp: int) -> None:
        """Change, and record the outcome."""
        try:
            outcome: AppliedStrategy | Exception = await self._rescale(dp)
        except Exception as error:  # raised where the strategy was asked for
            self._worker.log.warning("the strategy dp=%d was not applied: %s", dp, error)
            outcome = error
            if isinstance(error, StrategyUnknown):
                self._unknown = error
        async with self._changed:
            self._outcomes.append(outcome)
            self._changed.notify_all()

    async def _rescale(self, dp: int) -> AppliedStrategy:
        old = self.active_ranks
        objection = await self._objection()
        with self._worker.span("rescale", dp=dp):
            report = await self._worker.compute(
                self._sharing.rescalable().rescale,
                dp,
                timeout=self._timeout,
                bucket_bytes=self._bucket_bytes,
                objection=objection,
            )
        self._dp = dp
        if self._worker.rank < dp:
            self._sharing.take_share(dp)
        return AppliedStrategy(
            strategy=self.strategy,
            old_dp=old,
            active=report.active,
            seconds=report.seconds,
            sent_bytes=report.sent_bytes,
            received_bytes=report.received_bytes,
        )

    async def _objection(self) -> str:
        """Return why this rank cannot change.

        It takes part all the same: the others would wait for it in vain, and count one attempt more
        than it does.
        """
        try:
            await self._sharing.make_ready()
        except Exception as error:  # part of the error of the attempt
            if self._worker.world_size == 1:
                raise
            self._worker.log.warning("this rank is not ready to change", exc_info=True)
            return f"it could not be made ready: {type(error).__name__}: {error}"
        return self._sharing.objection()

    def _check_known(self) -> None:
        if self._unknown is not None:
            raise self._unknown

    def _check(self, strategy: Strategy) -> None:
        name, launched = self._worker.name, self._worker.world_size
        if not self._prepared:
            raise StrategyError(
                [f"{name} is not prepared: call init_trainer_resharding() on all ranks first"]
            )
        faults = [
            f"{field}={size}: FSDP shards over dp alone, so {field} must be 1"
            for field in ("tp", "pp", "cp", "ep", "virtual_stages")
            if (size := getattr(strategy, field)) != 1
        ]
        if strategy.sharding not in (Replicated(), FSDP2()):
            faults.append(f"sharding={strategy.sharding}: only FSDP2() can change while it trains")
        if strategy.dp > launched:
            faults.append(f"dp={strategy.dp}: only {launched} ranks were launched")
        if faults:
            raise StrategyError(faults)
        self._sharing.check_share(strategy.dp)  # it may be stricter since the sizes were computed

    def _can_share(self, dp: int) -> bool:
        try:
            self._sharing.check_share(dp)
        except ValueError:
            return False
        return True
