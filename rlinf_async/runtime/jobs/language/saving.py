"""The checkpoints of a language run, written while it goes on: one at a time.

::

    begin     books as they are now -> bytes; the learners copy what they hold     then: go on
    beside    the learners write -----------> run.msgpack -> latest.json -> old checkpoints go
    finish    waits for that

Invariant: ``latest.json`` names a checkpoint only when all of it is on the disk. Killed before, the
run goes on from the one before.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.language.failures import beside
from rlinf_async.runtime.jobs.language.learners import Learners
from rlinf_async.runtime.jobs.language.reached import Books, Reached, Unfinished, keep


class Saving:
    """Writes the checkpoints of one run.

    Args:
        cluster: ends with the first checkpoint that fails.
        learners: who hold the weights.
        checkpoints: the folder they go into.
        count: how many are kept.
    """

    def __init__(self, cluster: Cluster, learners: Learners, checkpoints: Path, count: int) -> None:
        self._cluster = cluster
        self._learners = learners
        self._checkpoints = checkpoints
        self._count = count
        self._writing: asyncio.Task[None] | None = None

    async def begin(self, reached: Reached, unfinished: Unfinished) -> None:
        """Start the checkpoint of this version; waits for the one before."""
        books = Books.of(reached, unfinished)
        await self.finish()
        await self._learners.begin_save(self._checkpoints / books.name)
        self._writing = beside(self._cluster, self._write(books), f"checkpoint {books.name}")

    async def _write(self, books: Books) -> None:
        await self._learners.saved(self._checkpoints / books.name)
        # It waits for the disk, and removes gigabytes.
        await asyncio.to_thread(keep, self._checkpoints, books, self._count)

    async def finish(self) -> None:
        """Wait until the checkpoint that was begun is on the disk. Raises its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    def cancel(self) -> None:
        """Leave what is being written: the run has failed, and ends."""
        if self._writing is not None:
            self._writing.cancel()
