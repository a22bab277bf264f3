"""`Rescaling`: an actor whose number of training ranks changes while the run goes on.

::

    init_trainer_resharding -> apply_parallel_strategy, as often as wanted
                                 between two calls that train      at once
                                 while one trains                  at the end of the iteration

                            waits for                        unblocked by
    apply_parallel_strategy the end of the iteration         training
                            all launched ranks               they are all asked
    an idle rank            rank 0's word on the iteration   rank 0's training

Every rank is asked for the same strategies in the same order. While they train, rank 0 says after
every iteration which of them are due, so that all ranks change at the same place though the calls
reach them at different times.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from rlinf_async.backends.base import Rescalable, StrategyUnknown
from rlinf_async.parallel import FSDP2, Replicated, Strategy, StrategyError
from rlinf_async.workers.base import Worker

if TYPE_CHECKING:
    from rlinf_async.workers.collective import Board

LONGEST_NAP = 0.05
"""seconds between two looks for rank 0's word"""
DEFAULT_TIMEOUT = 120.0
DEFAULT_BUCKET_BYTES = 16 * 1024 * 1024


class AppliedStrategy(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a strategy on one rank."""

    strategy: Strategy
    old_dp: int
    active: bool
    """this rank trains now; else it is an idle member without memory of the model"""
    seconds: float
    sent_bytes: int
    received_bytes: int


def as_rescalable(trainer: object, backend: str) -> Rescalable:
    """The trainer; raises `StrategyError` where its backend, of this name, cannot."""
    if not isinstance(trainer, Rescalable):
        raise StrategyError([f"backend {backend!r} cannot change its ranks while it trains"])
    return trainer


class Rescaling(Worker, ABC):
    """What an actor needs beside its trainer, which is a `Rescalable`."""

    _dp = 0
    """ranks that train; 0 until anything else was said: all"""
    _valid: tuple[int, ...] | None = None
    _syncs = 0
    """iterations whose end rank 0 has left a word on; the words stay, so this is never set back"""
    _training = _at_once = 0
    _timeout = DEFAULT_TIMEOUT
    _bucket_bytes = DEFAULT_BUCKET_BYTES
    _unknown: StrategyUnknown | None = None
    """why this rank must not go on"""

    @abstractmethod
    def rescalable(self) -> Rescalable:
        """The trainer; raises `StrategyError` where its backend cannot."""

    @abstractmethod
    def check_share(self, dp: int) -> None:
        """Raise `ValueError` or `StrategyError` unless ``dp`` ranks can share an iteration."""

    @abstractmethod
    def take_share(self, dp: int) -> None:
        """Use the batch sizes of one of ``dp`` ranks from the next iteration on."""

    async def make_ready(self) -> None:
        """What this rank does before it changes."""

    def objection(self) -> str:
        """Why this rank cannot change now; empty where it can."""
        return ""

    @property
    def active_world_size(self) -> int:
        """How many ranks train: 0 .. active_world_size - 1. The data of an iteration is theirs."""
        return self._dp or self.world_size

    @property
    def active(self) -> bool:
        """This rank trains."""
        return self.rank < self.active_world_size

    async def strategy(self) -> Strategy:
        """The strategy that is in force."""
        return Strategy(dp=self.active_world_size, sharding=FSDP2())

    async def init_trainer_resharding(
        self,
        first_world_size: int = -1,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> list[int]:
        """Prepare for other strategies, on all launched ranks; return the valid DP sizes.

        Called again, between two calls that train, it changes ``timeout``, ``bucket_bytes`` and the
        number of ranks.

        Args:
            first_world_size: how many ranks train at first; -1: as many as can.
            timeout: seconds that one change may take, waiting for other ranks included.
            bucket_bytes: memory for what travels, beside old and new shards.

        Raises `StrategyError` where no number of ranks, or not the first, can share an iteration,
        and while this rank trains or changes.
        """
        self.rescalable()
        if self._valid is None:
            self._asked: list[int] = []
            self._outcomes: list[AppliedStrategy | Exception] = []
            self._changed, self._applying = asyncio.Condition(), asyncio.Lock()
        elif self._training or len(self._outcomes) < len(self._asked):
            fault = f"{self.name} trains or changes its ranks: init_trainer_resharding() must wait"
            raise StrategyError([fault])
        self._timeout, self._bucket_bytes = timeout, bucket_bytes
        self._valid = tuple(dp for dp in range(1, self.world_size + 1) if self._can_share(dp))
        if not self._valid:
            self.check_share(self.world_size)
        first = self._valid[-1] if first_world_size == -1 else first_world_size
        self._check(Strategy(dp=first))
        if first != self.active_world_size:
            await self.apply_parallel_strategy(Strategy(dp=first))
        return list(self._valid)

    async def apply_parallel_strategy(self, parallel_strategy: Strategy) -> AppliedStrategy:
        """Let the first ``dp`` ranks train from the next iteration on. On all launched ranks.

        While an iteration is trained, this waits for its end. What is sent for the next one must
        go to the ranks of the new size: see `LanguageTrainReport.ranks`.

        Raises:
            StrategyError: sizes other than ``dp`` are not 1, or ``dp`` ranks cannot share an
                iteration.
            RescaleError: it failed on a rank; all train on as before.
            PeerLost: a rank died, or was not there in time.
            StrategyUnknown: this rank cannot know what the others did, and has to be ended; what it
                trains fails too, at the end of the iteration.
        """
        self._check_known()
        self._check(parallel_strategy)
        number = len(self._asked)
        self._asked.append(parallel_strategy.dp)
        self._go_on()
        async with self._changed:
            await self._changed.wait_for(lambda: number < len(self._outcomes))
        outcome = self._outcomes[number]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def scheduler_scale_sync(self) -> None:
        """Change to what was asked for meanwhile. At the end of an iteration, on all ranks.

        Raises `StrategyUnknown` where this rank cannot train on.
        """
        if self._valid is None or self.world_size == 1:
            return
        from rlinf_async.workers.collective import Board

        board, key = Board("strategy"), str(self._syncs)
        self._syncs += 1
        async with self._applying:
            if self.rank == 0:
                due = self._asked[len(self._outcomes) :]
                await self.compute(board.write, key, msgspec.msgpack.encode(due))
            else:
                due = msgspec.msgpack.decode(await self._read(board, key), type=list[int])
            for dp in due:
                await self._apply(dp)
        self._check_known()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Strategies wait for the end of an iteration while the block runs."""
        if self._valid is None:
            yield
            return
        self._training += 1
        try:
            if self._training == 1:
                # What was asked for before training was, on every rank: it is applied first.
                self._at_once = number = len(self._asked)
                async with self._changed:
                    await self._changed.wait_for(lambda: number <= len(self._outcomes))
            self._check_known()
            yield
        finally:
            self._training -= 1
            self._go_on()

    def _go_on(self) -> None:
        """Change to what was asked for, unless an iteration is trained.

        In a task of its own: the ranks change together, and a call that is cancelled on one of
        them, because it failed on another, must not leave it half changed.
        """
        if self._due_now():
            self._changing = asyncio.create_task(self._apply_all())

    def _due_now(self) -> bool:
        return len(self._outcomes) < (self._at_once if self._training else len(self._asked))

    async def _apply_all(self) -> None:
        async with self._applying:
            while self._due_now():
                await self._apply(self._asked[len(self._outcomes)])

    async def _read(self, board: Board, key: str) -> bytes:
        nap = 0.001
        while (word := await self.compute(board.read, key)) is None:
            await asyncio.sleep(nap)
            nap = min(nap * 1.5, LONGEST_NAP)
        return word

    async def _apply(self, dp: int) -> None:
        """Change, and note what came of it."""
        try:
            outcome: AppliedStrategy | Exception = await self._rescale(dp)
        except Exception as error:  # it is raised where it was asked for
            self.log.warning("the strategy dp=%d was not applied: %s", dp, error)
            outcome = error
            if isinstance(error, StrategyUnknown):
                self._unknown = error
        async with self._changed:
            self._outcomes.append(outcome)
            self._changed.notify_all()

    async def _rescale(self, dp: int) -> AppliedStrategy:
        old = self.active_world_size
        objection = await self._objection()
        with self.span("rescale", dp=dp):
            report = await self.compute(
                self.rescalable().rescale,
                dp,
                timeout=self._timeout,
                bucket_bytes=self._bucket_bytes,
                objection=objection,
            )
        self._dp = dp
        if self.active:
            self.take_share(dp)
        return AppliedStrategy(
            strategy=await self.strategy(),
            old_dp=old,
            active=report.active,
            seconds=report.seconds,
            sent_bytes=report.sent_bytes,
            received_bytes=report.received_bytes,
        )

    async def _objection(self) -> str:
        """Why this rank cannot change. It then says so to the others, who would else wait for it
        in vain, and count one attempt more than it does."""
        try:
            await self.make_ready()
        except Exception as error:  # what comes of the attempt has it
            if self.world_size == 1:
                raise
            self.log.warning("this rank is not ready to change", exc_info=True)
            return f"it could not be made ready: {type(error).__name__}: {error}"
        return self.objection()

    def _check_known(self) -> None:
        if self._unknown is not None:
            raise self._unknown

    def _check(self, strategy: Strategy) -> None:
        if self._valid is None:
            raise StrategyError(
                [f"{self.name} is not prepared: call init_trainer_resharding() on all ranks first"]
            )
        faults = [
            f"{name}={size}: FSDP shards over dp alone, so {name} must be 1"
            for name in ("tp", "pp", "cp", "ep", "virtual_stages")
            if (size := getattr(strategy, name)) != 1
        ]
        if strategy.sharding not in (Replicated(), FSDP2()):
            faults.append(f"sharding={strategy.sharding}: only FSDP2() can change while it trains")
        if strategy.dp > self.world_size:
            faults.append(f"dp={strategy.dp}: only {self.world_size} ranks were launched")
        if faults:
            raise StrategyError(faults)
        self.check_share(strategy.dp)  # what is shared may be known since the sizes were

    def _can_share(self, dp: int) -> bool:
        try:
            self.check_share(dp)
        except ValueError:
            return False
        return True
