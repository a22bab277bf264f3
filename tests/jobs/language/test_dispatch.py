"""`Dispatcher`: groups go to the ranks that train the next global batch."""

from __future__ import annotations

import asyncio

from rlinf_async.channels import Channel
from rlinf_async.messages.language import SampleGroup
from rlinf_async.runtime.jobs.language.dispatch import Dispatcher
from rlinf_async.testing import explore
from rlinf_async.workers.scheduler import Boundary, DataShare


def group(number: int) -> SampleGroup:
    return SampleGroup(iteration=number // 4, group=number, samples=[])


def test_the_groups_of_a_global_batch_are_shared_among_the_ranks_that_train_it() -> None:
    async def body() -> None:
        groups = Channel(SampleGroup, name="groups", capacity=64)
        shares = Channel(DataShare, name="shares", capacity=8)
        dispatcher = Dispatcher(groups.sender, shares.receiver, batch=2, first=0)
        running = asyncio.create_task(dispatcher.run())
        for number in (3, 0, 2, 1):
            dispatcher.add(group(number))
        for done, ranks in enumerate((1, 2)):
            await shares.sender.put(DataShare(boundary=Boundary(0, done), ranks=ranks))
        found = [(await groups.receiver.get(key=key)).group for key in (0, 0, 0, 1)]
        assert found == [0, 1, 2, 3]
        shares.close()
        await running
        groups.receiver.close()

    explore(body, seeds=range(10))


def test_without_an_order_groups_go_as_they_come() -> None:
    async def body() -> None:
        groups = Channel(SampleGroup, name="groups", capacity=64)
        shares = Channel(DataShare, name="shares", capacity=8)
        dispatcher = Dispatcher(groups.sender, shares.receiver, batch=3)
        running = asyncio.create_task(dispatcher.run())
        await shares.sender.put(DataShare(boundary=Boundary(0, 0), ranks=1))
        for number in (3, 0, 2):
            dispatcher.add(group(number))
        assert [(await groups.receiver.get(key=0)).group for _ in range(3)] == [3, 0, 2]
        shares.close()
        await running
        groups.receiver.close()

    explore(body, seeds=range(10))
