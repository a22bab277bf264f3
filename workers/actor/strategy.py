"""`StrategyChanges`: the strategy changes while the run goes on.

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
from rlinf_async.parallel import Strategy, StrategyError
from rlinf_async.workers.base import Worker
from rlinf_async.workers.collective import GroupStore

LONGEST_POLL = 0.05
"""seconds between two reads of the store"""
DEFAULT_TIMEOUT = 120.0
DEFAULT_BUCKET_BYTES = 16 * 1024 * 1024


class AppliedStrategy(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a strategy on one rank."""

    strategy: Strategy
    old_strategy: Strategy
    active: bool
    """this rank trains now; else it is an idle member without memory of the model"""
    seconds: float
    sent_bytes: int
    received_bytes: int


class Sharing(Protocol):
    """How the ranks of a worker share an iteration."""

    @property
    def launched_ranks(self) -> int:
        """Ranks of all workers of the group."""
        ...

    def rescalable(self) -> Rescalable:
        """Return the trainer; raises `StrategyError` where its backend cannot change its ranks."""
        ...

    def parallel(self) -> Strategy:
        """Return the strategy of the trainer."""
        ...

    def check_share(self, dp: int) -> None:
        """Raise `ValueError` or `StrategyError` unless ``dp`` data ranks can share an iteration."""
        ...

    def take_share(self, dp: int) -> None:
        """Use the batch sizes of one of ``dp`` data ranks from the next iteration on."""
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
        self._strategy: Strategy | None = None
        """in force; None until it changes: the trainer's own"""
        self._prepared = False
        self._asked: list[Strategy] = []
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
        return self._strategy.world_size if self._strategy else self._sharing.launched_ranks

    @property
    def strategy(self) -> Strategy:
        """The strategy that is in force."""
        return self._strategy or self._sharing.parallel()

    async def prepare(self, first: int, timeout: float, bucket_bytes: int) -> list[int]:
        """See `TrainingWorker.init_trainer_resharding`."""
        self._sharing.rescalable()
        if self._training or len(self._outcomes) < len(self._asked):
            fault = "trains or changes its ranks: init_trainer_resharding() must wait"
            raise StrategyError([f"{self._worker.name} {fault}"])
        self._timeout, self._bucket_bytes = timeout, bucket_bytes
        present = self.strategy
        part = present.world_size // present.dp  # ranks of one model
        sizes = [_with_dp(present, dp) for dp in range(1, self._sharing.launched_ranks // part + 1)]
        valid = [one.dp for one in sizes if self._fits(one)]
        if not valid:
            self._check_fits(sizes[-1])
        self._prepared = True
        if first == -1:
            first = valid[-1] * part
        elif first % part:
            raise StrategyError(
                [f"{first} ranks are not whole models of {part} ranks ({present.sizes})"]
            )
        strategy = _with_dp(present, first // part)
        self._check(strategy)
        if first != self.active_ranks:
            await self.apply(strategy)
        return valid

    async def apply(self, strategy: Strategy) -> AppliedStrategy:
        """See `TrainingWorker.apply_parallel_strategy`."""
        self._check_known()
        self._check(strategy)
        number = len(self._asked)
        self._asked.append(strategy)
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
                due = msgspec.msgpack.decode(await self._read(store, key), type=list[Strategy])
            for strategy in due:
                await self._apply(strategy)
        self._check_known()

    async def at_boundary(self, strategy: Strategy) -> str:
        """Change now, between two mini-batches, as all other ranks do; why not, if it failed.

        Raises `StrategyUnknown` where this rank cannot train on.
        """
        self._check_known()
        async with self._applying:
            try:
                self._check(strategy)
                await self._rescale(strategy)
            except StrategyUnknown as error:
                self._unknown = error
                raise
            except Exception as error:  # all ranks train on as before, and the scheduler hears why
                text = f"{type(error).__name__}: {error}"
                self._worker.log.warning(
                    "the strategy %s was not applied: %s", strategy.sizes, text
                )
                return text
        return ""

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

    async def _apply(self, strategy: Strategy) -> None:
        """Change, and record the outcome."""
        try:
            outcome: AppliedStrategy | Exception = await self._rescale(strategy)
        except Exception as error:  # raised where the strategy was asked for
            said = (strategy.sizes, error)
            self._worker.log.warning("the strategy %s was not applied: %s", *said)
            outcome = error
            if isinstance(error, StrategyUnknown):
                self._unknown = error
        async with self._changed:
            self._outcomes.append(outcome)
            self._changed.notify_all()

    async def _rescale(self, strategy: Strategy) -> AppliedStrategy:
        objection = await self._objection()
        with self._worker.span("rescale", tp=strategy.tp, pp=strategy.pp, dp=strategy.dp):
            report = await self._worker.compute(
                self._sharing.rescalable().rescale,
                strategy,
                timeout=self._timeout,
                bucket_bytes=self._bucket_bytes,
                objection=objection,
            )
        self._strategy = report.new_strategy
        if report.active:
            self._sharing.take_share(strategy.dp)
        return AppliedStrategy(
            strategy=report.new_strategy,
            old_strategy=report.old_strategy,
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
        name = self._worker.name
        if not self._prepared:
            raise StrategyError(
                [f"{name} is not prepared: call init_trainer_resharding() on all ranks first"]
            )
        self._check_fits(strategy)  # it may be stricter since the sizes were computed

    def _check_fits(self, strategy: Strategy) -> None:
        """Raise `StrategyError` or `ValueError` for what model, ranks or batches do not fit."""
        self._sharing.rescalable().check_strategy(strategy)
        launched = self._sharing.launched_ranks
        if strategy.world_size > launched:
            raise StrategyError([f"{strategy.sizes}: only {launched} ranks were launched"])
        self._sharing.check_share(strategy.dp)

    def _fits(self, strategy: Strategy) -> bool:
        try:
            self._check_fits(strategy)
        except ValueError:
            return False
        return True


def _with_dp(strategy: Strategy, dp: int) -> Strategy:
    return msgspec.structs.replace(strategy, dp=dp)
