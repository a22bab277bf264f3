"""`TrainingWorker`: one rank of a group that trains one model.

It has what all of them need: trainer, checkpoints, a number of training ranks that may change.

::

                            waits for                          unblocked by
    setup                   the other ranks                    they are launched together
    begin_checkpoint        the checkpoint before              its thread
    checkpoint_written      the disk
    apply_parallel_strategy see `StrategyChanges`

What an iteration is made of is up to the subclass: `EmbodiedFSDPActor`, `FSDPActor`, `FSDPCritic`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlinf_async.backends.base import Rescalable, Trainer, made_by
from rlinf_async.observe.files import explaining
from rlinf_async.parallel import Strategy, StrategyError
from rlinf_async.workers.actor.strategy import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_TIMEOUT,
    AppliedStrategy,
    StrategyChanges,
)
from rlinf_async.workers.base import Worker

TrainerT = TypeVar("TrainerT", bound=Trainer)


class TrainingWorker(Worker, ABC, Generic[TrainerT]):
    """One rank that trains.

    Args:
        trainer: configuration of the trainer backend, as plain data or its own Struct.
        backend: its registered name.
        resume: folder of the checkpoint to go on from.
    """

    _trainer: TrainerT = made_by("setup()")
    stands_for = 1
    """ranks that this worker is: one, but in simulations, where those of one copy of a model do the
    same at the same time"""

    def __init__(self, trainer: Any, *, backend: str, resume: str | None) -> None:
        self._config = trainer
        self._backend_name = backend
        self._resume = resume
        self._checkpoint = PendingCheckpoint(self)
        self._changes = StrategyChanges(self, self)

    async def setup(self) -> None:
        """Build the model, with the other ranks, and load the checkpoint to go on from."""
        from rlinf_async.backends.registry import WITHOUT_COLLECTIVES

        if self.world_size > 1 and self._backend_name not in WITHOUT_COLLECTIVES:
            await self.join_collective()
        self._trainer = await self.compute(self.make_trainer)
        if self._resume is not None:
            await self.compute(self._trainer.load_checkpoint, Path(self._resume))

    async def teardown(self) -> None:
        """Let a checkpoint that is being written become complete."""
        await self._checkpoint.settle()

    @abstractmethod
    def make_trainer(self) -> TrainerT:
        """Build the trainer. Runs in the compute thread; override it to bring your own."""

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
