"""`Dispatcher`: gives the groups of each global batch to the ranks that train it.

::

    actor rank 0 --DataShare: who trains the next global batch--> Dispatcher
    Collector, or critics --whole groups, by iteration----------> Dispatcher --SampleGroup--> actors
    actors --samples of the first of several epochs-------------> Dispatcher

               waits for                                    unblocked by
    Dispatcher who trains the next global batch; a group    actor rank 0; the Collector, the critics
               in further epochs: all samples of the first  the actors

For runs whose actors change between mini-batches. A group is given to a rank when it is known which
ranks there are, so none is in the queue of a rank that does not train any more; its global batch is
that of its turn, whatever number of ranks shares it. Further epochs go through the same samples,
shuffled, as one actor alone would: the order depends on iteration and epoch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import numpy as np

from rlinf_async.channels import EndOfChannel, Receiver, Sender
from rlinf_async.messages.language import SampleGroup, TrainingSample
from rlinf_async.runtime.stall import WorkEvent
from rlinf_async.workers.scheduler import DataShare

SHUFFLED = -1
"""the group number of samples of several groups"""


class Dispatcher:
    """Hands out groups in the order in which they came, or in that of their numbers.

    Args:
        groups: to the actors, by key of the data rank.
        shares: from rank 0.
        batch: groups of a global batch, over all ranks.
        batches: global batches of an epoch; needed where there are several epochs.
        samples: of an iteration; the same.
        again: samples of the first epoch, which further ones give out, too; the same.
        first: number of the first group, where they are to go in the order of their numbers, so
            that the same samples make the same global batches; None: as they come.
    """

    def __init__(
        self,
        groups: Sender[SampleGroup],
        shares: Receiver[DataShare],
        *,
        batch: int,
        batches: int = 1,
        samples: int = 0,
        again: Receiver[SampleGroup] | None = None,
        first: int | None = None,
    ) -> None:
        self._groups, self._shares, self._again = groups, shares, again
        self._batch, self._batches, self._samples = batch, batches, samples
        self._number = first
        self._early: dict[int, SampleGroup] = {}
        """groups before which another one has to come"""
        self._ready: deque[SampleGroup] = deque()
        self._added = WorkEvent()
        self._trained: dict[int, list[TrainingSample]] = {}
        """samples of the first epoch, by iteration"""
        self._returned = WorkEvent()

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

    async def receive(self, valued: Receiver[SampleGroup], ranks: int) -> None:
        """Take groups of so many critics, by key of each, until no more come."""

        async def of(rank: int) -> None:
            try:
                while True:
                    self.add(await valued.get(key=rank))
            except EndOfChannel:
                return

        async with asyncio.TaskGroup() as receiving:
            for rank in range(ranks):
                receiving.create_task(of(rank))

    async def run(self) -> None:
        """Hand out global batch after global batch, until no more shares come."""
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(self._keep())
            async for share in self._shares:
                epoch, batch = divmod(share.boundary.done, self._batches)
                if self._again is not None and epoch:
                    await self._hand_out_again(share, epoch, batch)
                else:
                    await self._hand_out(share)
            keeping.cancel()

    async def _hand_out(self, share: DataShare) -> None:
        """Give every rank equally many groups, and as nearly as many tokens as can be: of the
        groups that are here, the longest goes first, to the rank that has least."""
        room = [self._batch // share.ranks] * share.ranks
        tokens = [0] * share.ranks
        while any(room):
            for group in sorted(await self._next(sum(room)), key=_tokens, reverse=True):
                rank = min((one for one, left in enumerate(room) if left), key=tokens.__getitem__)
                room[rank] -= 1
                tokens[rank] += _tokens(group)
                await self._groups.put(group, key=rank)

    async def _next(self, most: int) -> list[SampleGroup]:
        """Return the groups that are here, in their order; wait for one if there are none."""
        while not self._ready:
            self._added.clear()
            await self._added.wait()
        return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]

    # -- further epochs -----------------------------------------------------------------------

    async def _keep(self) -> None:
        if self._again is None:
            return
        async for group in self._again:
            self._trained.setdefault(group.iteration, []).extend(group.samples)
            self._returned.set()

    async def _hand_out_again(self, share: DataShare, epoch: int, batch: int) -> None:
        iteration = share.boundary.iteration
        samples = await self._all_of(iteration)
        order = np.random.default_rng((iteration, epoch, 0)).permutation(len(samples))
        size = len(samples) // self._batches
        there = [samples[at] for at in order[batch * size : (batch + 1) * size]]
        for rank, part in enumerate(_parts(there, share.ranks)):
            group = SampleGroup(iteration=iteration, group=SHUFFLED, samples=part)
            await self._groups.put(group, key=rank)

    async def _all_of(self, iteration: int) -> Sequence[TrainingSample]:
        """Wait for all samples of the first epoch; they are ordered by their groups."""
        for older in [one for one in self._trained if one < iteration]:
            del self._trained[older]
        while len(self._trained.get(iteration, ())) < self._samples:
            self._returned.clear()
            await self._returned.wait()
        return sorted(self._trained[iteration], key=lambda one: (one.group, one.index))


def _tokens(group: SampleGroup) -> int:
    return sum(one.tokens for one in group.samples)


def _parts(samples: list[TrainingSample], ranks: int) -> list[list[TrainingSample]]:
    size = len(samples) // ranks
    return [samples[rank * size : (rank + 1) * size] for rank in range(ranks)]
