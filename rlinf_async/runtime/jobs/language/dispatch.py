"""`Dispatcher`: gives the groups of each global batch to the ranks that train it.

::

    actor rank 0 --DataShare: who trains the next global batch--> Dispatcher
    Collector    --whole groups, iteration by iteration---------> Dispatcher --SampleGroup--> actors

               waits for                                    unblocked by
    Dispatcher who trains the next global batch; a group    actor rank 0; the Collector

For runs whose actors change between mini-batches. A group is given to a rank when it is known which
ranks there are, so none is in the queue of a rank that does not train any more; its global batch is
that of its turn, whatever number of ranks shares it.
"""

from __future__ import annotations

from collections import deque

from rlinf_async.channels import Receiver, Sender
from rlinf_async.messages.language import SampleGroup
from rlinf_async.runtime.stall import WorkEvent
from rlinf_async.workers.scheduler import DataShare


class Dispatcher:
    """Hands out groups in the order in which they came, or in that of their numbers.

    Args:
        groups: to the actors, by key of the data rank.
        shares: from rank 0.
        batch: groups of a global batch, over all ranks.
        first: number of the first group, where they are to go in the order of their numbers, so
            that the same samples make the same global batches; None: as they come.
    """

    def __init__(
        self,
        groups: Sender[SampleGroup],
        shares: Receiver[DataShare],
        *,
        batch: int,
        first: int | None = None,
    ) -> None:
        self._groups, self._shares = groups, shares
        self._batch = batch
        self._number = first
        self._early: dict[int, SampleGroup] = {}
        """groups before which another one has to come"""
        self._ready: deque[SampleGroup] = deque()
        self._added = WorkEvent()

    def add(self, group: SampleGroup) -> None:
        """Take a whole group; those of an iteration come before those of the next."""
        if self._number is None:
            self._ready.append(group)
        else:
            self._early[group.group] = group
            while (one := self._early.pop(self._number, None)) is not None:
                self._ready.append(one)
                self._number += 1
        self._added.set()

    async def run(self) -> None:
        """Hand out global batch after global batch, until no more shares come."""
        async for share in self._shares:
            for position in range(self._batch):
                group = await self._next()
                await self._groups.put(group, key=position % share.ranks)

    async def _next(self) -> SampleGroup:
        while not self._ready:
            self._added.clear()
            await self._added.wait()
        return self._ready.popleft()
