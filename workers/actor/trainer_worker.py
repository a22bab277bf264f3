"""`TrainerWorker`: one rank that holds a language model's trainer: its life, without training.

::

                 waits for               unblocked by
    setup        the other ranks         they are launched together
    offload, ... the compute thread      itself
    pass_through a sample                who sends them: rollout workers
                 room for it             who takes them: reward workers
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_async.channels import EndOfChannel, Receiver, Sender
from rlinf_async.messages.language import Sample
from rlinf_async.observe.files import explaining
from rlinf_async.workers.actor.config import LanguageBatches
from rlinf_async.workers.actor.errors import IncompleteShare
from rlinf_async.workers.base import Worker

if TYPE_CHECKING:
    from rlinf_async.backends.language import LanguageTrainer


class TrainerWorker(Worker):
    """One rank of an actor or critic group.

    Args:
        trainer: configuration of the trainer backend, as its own Struct.
        batches: sizes of an iteration.
        backend: its registered name.
        resume: folder of the checkpoint to go on from.
        max_staleness: versions that a token's weights may be behind those that are trained; None:
            any number.
    """

    def __init__(
        self,
        trainer: Any,
        batches: LanguageBatches,
        *,
        backend: str = "fsdp",
        resume: str | None = None,
        max_staleness: int | None = None,
    ) -> None:
        self._config = trainer
        self._backend_name = backend
        self._resume = resume
        self._max_staleness = max_staleness
        self._batch_sizes = batches
        """of an iteration, over all ranks"""
        self._sizes = batches.of_rank(self.world_size)
        self._epochs = batches.epochs
        self._group_size = batches.group_size
        self._offloaded = False
        self._flight: Future[Path] | None = None
        self._saving = Path()

    async def setup(self) -> None:
        """Build the model, with the other ranks, and take the checkpoint to go on from."""
        if self.world_size > 1:
            await self.join_collective()
        self._trainer: LanguageTrainer = await self.compute(self.make_trainer)
        if self._resume is not None:
            await self.load_checkpoint(self._resume)

    def make_trainer(self) -> LanguageTrainer:
        """Build the trainer. Runs in the compute thread; override it to bring your own."""
        from rlinf_async.backends.registry import load_language_trainer

        return load_language_trainer(self._backend_name)(self._config, self.world_size, self.rank)

    async def version(self) -> int:
        """How many iterations the model was trained for."""
        return self._trainer.version

    async def offload(self) -> None:
        """Give the device's memory back."""
        if not self._offloaded:
            with self.span("offload"):
                await self.compute(self._trainer.offload)
            self._offloaded = True

    async def onload(self) -> None:
        """Take weights and optimizer back to the device, if they are not there."""
        if self._offloaded:
            with self.span("onload"):
                await self.compute(self._trainer.onload)
            self._offloaded = False

    async def save_checkpoint(self, path: str, extra: Mapping[str, Any] | None = None) -> str:
        """Write a checkpoint folder, every rank its own shard; returns its path.

        ``extra``: plain values of this rank's own, which `load_checkpoint` gives back.
        """
        folder = Path(path)
        with self.span("checkpoint"), explaining("write the checkpoint", folder):
            await self.compute(self._trainer.save_checkpoint, folder, extra)
        return path

    async def begin_checkpoint(self, path: str, extra: Mapping[str, Any] | None = None) -> None:
        """Start writing what `save_checkpoint` writes; training may go on.

        Waits for the one before, and raises its error.
        """
        folder = Path(path)
        with self.span("checkpoint"), explaining("write the checkpoint", folder):
            self._flight = await self.compute(self._trainer.begin_checkpoint, folder, extra)
            self._saving = folder

    async def checkpoint_written(self) -> None:
        """Wait until this rank's part of the checkpoint is on the disk; raises its error.

        When every rank has answered, the folder is there. Does not hold the training up.
        """
        if self._flight is not None:
            with explaining("write the checkpoint", self._saving):
                await asyncio.wrap_future(self._flight)

    async def teardown(self) -> None:
        """Let a checkpoint that is being written become complete."""
        if self._flight is not None:
            await asyncio.gather(asyncio.wrap_future(self._flight), return_exceptions=True)

    async def load_checkpoint(self, path: str) -> list[dict[str, object]]:
        """Go on where a checkpoint was written, by any number of ranks; their extras."""
        return await self.compute(self._trainer.load_checkpoint, Path(path))

    async def pass_through(
        self,
        input_channel: Receiver[Sample],
        output_channel: Sender[Sample],
        answer: Callable[[list[Sample]], list[Sample]],
    ) -> int:
        """Send this rank's share of one iteration on, answered batch by batch; their number.

        One rank alone takes what is ready. The ranks of a sharded model compute together: each
        takes equally many samples, and waits for the others'. Samples are leased until they were
        sent on. Raises `IncompleteShare` when the channel ends before.
        """
        await self.onload()
        left = self._sizes.total_batch_size
        size = self._sizes.micro_batch_size or self._sizes.global_batch_size
        least = 1 if self.world_size == 1 else None
        try:
            while left > 0:
                async with input_channel.lease(weight=min(size, left), at_least=least) as batch:
                    with self.span("inference", samples=len(batch)):
                        done = await self.compute(answer, list(batch))
                    for sample in done:
                        await output_channel.put(sample)
                left -= len(batch)
        except EndOfChannel:
            raise IncompleteShare(
                f"the channel {input_channel.channel_name!r} ended {left} samples before the "
                f"{self._sizes.total_batch_size} of this iteration on {self.name}"
            ) from None
        return self._sizes.total_batch_size
