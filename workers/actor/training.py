"""`TrainingWorker`: one rank of a group that trains one model.

It has what all of them need: trainer, checkpoints, a number of training ranks that may change.

::

                            waits for                          unblocked by
    setup                   the other ranks                    they are launched together
    begin_checkpoint        the checkpoint before              its thread
    checkpoint_written      the disk
    apply_parallel_strategy see `StrategyChanges`

What an iteration is made of is up to the subclass: `EmbodiedFSDPActor`, `LanguageActor`,
`LanguageCritic`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from rlinf_async.backends.base import (
    FirstWeights,
    Rescalable,
    StrategyUnknown,
    TakesWeights,
    Trainer,
    made_by,
)
from rlinf_async.config.registry import Registry
from rlinf_async.observe.files import explaining
from rlinf_async.parallel import Strategy, StrategyError
from rlinf_async.workers.base import GroupStore, Worker

LONGEST_POLL = 0.05
"""seconds between two reads of the store"""
DEFAULT_TIMEOUT = 120.0
"""seconds that a change of strategy may wait for other ranks"""
DEFAULT_BUCKET_BYTES = 16 * 1024 * 1024
"""bytes that a rank sends to another at a time in a change of strategy"""


class AppliedStrategy(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a strategy on one rank."""

    strategy: Strategy
    old_strategy: Strategy
    active: bool
    """whether this rank trains now; else it is an idle member without memory of the model"""
    seconds: float
    sent_bytes: int
    received_bytes: int


class StrategyChanges:
    """The strategies that one worker was asked for, and what came of them.

    ::

        prepare -> apply, as often as wanted
                     between two calls that train      at once
                     while one trains                  at the end of the iteration

                        waits for                                unblocked by
        apply           the end of the iteration                 training
                        all launched ranks                       they are all asked
        an idle rank    rank 0's list of strategies, at the      rank 0's training
                        end of an iteration

    Every rank is asked for the same strategies in the same order. While they train, rank 0 writes
    after every iteration which of them are due, so that all ranks change at the same place though
    the calls reach them at different times.
    """

    def __init__(self, worker: TrainingWorker[Any]) -> None:
        self._worker = worker
        self._strategy: Strategy | None = None
        """strategy in force; None until the first change: the trainer's own"""
        self._prepared = False
        self._asked: list[Strategy] = []
        self._outcomes: list[AppliedStrategy | Exception] = []
        """outcomes of the strategies that were applied: of the first of ``_asked``"""
        self._changed, self._applying = asyncio.Condition(), asyncio.Lock()
        self._syncs = 0
        """iterations whose due strategies rank 0 has written; the store keeps them, so this is
        never set back"""
        self._training = 0
        """calls that train now"""
        self._due_before_training = 0
        """number of strategies to apply before the training calls go on"""
        self._task: asyncio.Task[None] | None = None
        self._timeout = DEFAULT_TIMEOUT
        self._bucket_bytes = DEFAULT_BUCKET_BYTES
        self._unknown: StrategyUnknown | None = None
        """why this rank must not go on"""

    @property
    def active_ranks(self) -> int:
        """Number of ranks that train."""
        return self._strategy.world_size if self._strategy else self._worker.launched_ranks

    @property
    def strategy(self) -> Strategy:
        """The strategy that is in force."""
        return self._strategy or self._worker.parallel()

    async def prepare(self, first: int, timeout: float, bucket_bytes: int) -> list[int]:
        """See `TrainingWorker.init_trainer_resharding`."""
        self._worker.rescalable()
        if self._training or len(self._outcomes) < len(self._asked):
            fault = "trains or changes its ranks: init_trainer_resharding() must wait"
            raise StrategyError([f"{self._worker.name} {fault}"])
        self._timeout, self._bucket_bytes = timeout, bucket_bytes
        present = self.strategy
        part = present.world_size // present.dp  # ranks of one model
        sizes = [_with_dp(present, dp) for dp in range(1, self._worker.launched_ranks // part + 1)]
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
                self._worker.rescalable().rescale,
                strategy,
                timeout=self._timeout,
                bucket_bytes=self._bucket_bytes,
                objection=objection,
            )
        self._strategy = report.new_strategy
        if report.active:
            self._worker.take_share(strategy.dp)
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
            await self._worker.make_ready()
        except Exception as error:  # part of the error of the attempt
            if self._worker.world_size == 1:
                raise
            self._worker.log.warning("this rank is not ready to change", exc_info=True)
            return f"it could not be made ready: {type(error).__name__}: {error}"
        return self._worker.objection()

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
        self._worker.rescalable().check_strategy(strategy)
        launched = self._worker.launched_ranks
        if strategy.world_size > launched:
            raise StrategyError([f"{strategy.sizes}: only {launched} ranks were launched"])
        self._worker.check_share(strategy.dp)

    def _fits(self, strategy: Strategy) -> bool:
        try:
            self._check_fits(strategy)
        except ValueError:
            return False
        return True


def _with_dp(strategy: Strategy, dp: int) -> Strategy:
    return msgspec.structs.replace(strategy, dp=dp)


TrainerT = TypeVar("TrainerT", bound=Trainer)


class TrainingWorker(Worker, ABC, Generic[TrainerT]):
    """One rank that trains.

    Args:
        trainer: configuration of the trainer backend, as plain data or its own Struct.
        backend: registered name of the backend.
        resume: folder of the checkpoint to go on from.
        first: weights of another run to begin with, where it does not go on from a checkpoint.
    """

    parts: ClassVar[Registry[Any]]
    """where its trainer is found by name"""
    backend: ClassVar[str]
    """name of the trainer, where none is given"""
    _trainer: TrainerT = made_by("setup()")
    stands_for = 1
    """ranks that this worker is: one, but in simulations, where those of one copy of a model do the
    same at the same time"""

    def __init__(
        self,
        trainer: Any,
        *,
        backend: str | None,
        resume: str | None,
        first: FirstWeights | None = None,
    ) -> None:
        self._config = trainer
        self._backend_name = backend or self.backend
        self._resume = resume
        self._first = first
        self._checkpoint = PendingCheckpoint(self)
        self._changes = StrategyChanges(self)

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        name = arguments.get("backend") or cls.backend
        modules: tuple[str, ...] = cls.parts.load(name).slow_imports
        return modules

    async def setup(self) -> None:
        """Build the model, with the other ranks, and load what it goes on from or begins with."""
        if self.world_size > 1 and self.part.collective:
            await self.join_collective()
        self._trainer = await self.compute(self.make_trainer)
        if self._resume is not None:
            await self.compute(self._trainer.load_checkpoint, Path(self._resume))
        elif self._first is not None:
            await self.compute(self._takes_weights().take_weights, self._first)

    def _takes_weights(self) -> TakesWeights:
        trainer: object = self._trainer
        if not isinstance(trainer, TakesWeights):
            raise TypeError(
                f"backend {self._backend_name!r} cannot begin with weights of another run: it has "
                "no method take_weights(); leave model.path out"
            )
        return trainer

    async def teardown(self) -> None:
        """Let a checkpoint that is being written become complete."""
        await self._checkpoint.settle()

    @property
    def part(self) -> Any:
        """Description of the trainer."""
        return self.parts.load(self._backend_name)

    def make_trainer(self) -> TrainerT:
        """Build the trainer. Runs in the compute thread; override it to bring your own."""
        trainer: TrainerT = self.part.make(self._config, self.world_size, self.rank)
        return trainer

    async def version(self) -> int:
        """Return the number of iterations that the model was trained for."""
        return self._trainer.version

    # -- checkpoints --------------------------------------------------------------------------

    async def begin_checkpoint(self, path: str) -> None:
        """Start writing a checkpoint folder, every rank its own shard; training may go on.

        Waits for the checkpoint before, and raises its error.
        """
        folder = Path(path)
        with self.span("checkpoint", version=self._trainer.version):
            await self._checkpoint.begin(self._trainer.begin_checkpoint, folder)

    async def checkpoint_written(self) -> None:
        """Wait until this rank's part of the checkpoint is on the disk; raises its error.

        When every rank has returned, the folder exists. Training goes on meanwhile.
        """
        await self._checkpoint.wait()

    # -- the strategy -------------------------------------------------------------------------

    @property
    def active_world_size(self) -> int:
        """Number of ranks that train: 0 .. active_world_size - 1."""
        return self._changes.active_ranks

    @property
    def active(self) -> bool:
        """Whether this rank trains."""
        return self.rank * self.stands_for < self.active_world_size

    @property
    def launched_ranks(self) -> int:
        """Ranks of all workers of the group."""
        return self.world_size * self.stands_for

    async def strategy(self) -> Strategy:
        """Return the strategy that is in force."""
        return self._changes.strategy

    async def init_trainer_resharding(
        self,
        first_world_size: int = -1,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> list[int]:
        """Prepare for other strategies, on all launched ranks; return the valid DP sizes.

        Those are sizes of the strategy in force: with the same ``tp`` and ``pp``. Called again,
        between two calls that train, it changes ``timeout``, ``bucket_bytes`` and the number of
        ranks.

        Args:
            first_world_size: number of ranks that train at first; -1: as many as can.
            timeout: seconds that one change may take, waiting for other ranks included.
            bucket_bytes: memory for what travels, beside old and new shards.

        Raises `StrategyError` where no number of ranks, or not the first, can share an iteration,
        and while this rank trains or changes.
        """
        return await self._changes.prepare(first_world_size, timeout, bucket_bytes)

    async def apply_parallel_strategy(self, parallel_strategy: Strategy) -> AppliedStrategy:
        """Train under another strategy from the next iteration on. On all launched ranks.

        Its first ranks train; the others are idle. While an iteration is trained, this waits for
        its end. The data of the next one must go to the new data ranks: see ``ranks`` of a train
        report.

        Raises:
            StrategyError: the model or the launched ranks do not fit the strategy, or ``dp`` data
                ranks cannot share an iteration.
            RescaleError: it failed on a rank; all train on as before.
            PeerLost: a rank died, or was not there in time.
            StrategyUnknown: this rank cannot know what the others did, and has to be ended; what it
                trains fails too, at the end of the iteration.
        """
        return await self._changes.apply(parallel_strategy)

    async def scheduler_scale_sync(self) -> None:
        """Apply the strategies that are due. At the end of an iteration, on all ranks.

        Raises `StrategyUnknown` where this rank cannot train on.
        """
        await self._changes.at_end_of_iteration()

    def training(self) -> AbstractAsyncContextManager[None]:
        """Return the context of training an iteration: strategies wait for its end."""
        return self._changes.training()

    def rescalable(self) -> Rescalable:
        """Return the trainer; raises `StrategyError` where its backend cannot change its ranks."""
        if not isinstance(self._trainer, Rescalable):
            raise StrategyError(
                [f"backend {self._backend_name!r} cannot change its ranks while it trains"]
            )
        return self._trainer

    def parallel(self) -> Strategy:
        """Return the strategy of the trainer; one that cannot change is data parallel."""
        trainer: object = self._trainer
        return trainer.strategy if isinstance(trainer, Rescalable) else Strategy(dp=self.world_size)

    @abstractmethod
    def check_share(self, dp: int) -> None:
        """Raise `ValueError` or `StrategyError` unless ``dp`` data ranks can share an iteration."""

    def take_share(self, dp: int) -> None:
        """Use the batch sizes of one of ``dp`` data ranks from the next iteration on."""

    async def make_ready(self) -> None:
        """Do what this rank has to do before it changes."""

    def objection(self) -> str:
        """Return why this rank cannot change now; empty where it can."""
        return ""


class PendingCheckpoint:
    """The checkpoint of one rank that is being written, if there is one."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._written: Future[Path] | None = None
        self._path = Path()

    async def begin(self, begin: Callable[[Path], Future[Path]], path: Path) -> None:
        """Call ``begin`` in the compute thread; it waits for the checkpoint before.

        Raises `RunFolderError` where the folder cannot be written.
        """
        with explaining("write the checkpoint", path):
            self._written = await self._worker.compute(begin, path)
        self._path = path

    async def wait(self) -> Path | None:
        """Wait until this rank's part is on the disk; return the folder, once.

        None where no checkpoint was begun since the last. Raises `RunFolderError` where it could
        not be written.
        """
        written = self._written
        if written is None:
            return None
        try:
            with explaining("write the checkpoint", self._path):
                await asyncio.wrap_future(written)
        finally:
            if written.done() and self._written is written:
                self._written = None
        return self._path

    async def settle(self) -> None:
        """Wait until nothing is being written, whether it succeeds or fails."""
        if self._written is not None:
            await asyncio.gather(asyncio.wrap_future(self._written), return_exceptions=True)


class WeightsDisagree(RuntimeError):
    """An engine's log-probs differ from the actor's; the message has both, and the token."""


class IncompleteShare(RuntimeError):
    """Fewer samples arrived than an iteration has; the message has the numbers."""
