"""`Dispatcher`: groups go to the ranks that train the next global batch."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from rlinf_async.channels import Channel
from rlinf_async.messages.language import Boundary, DataShare, SampleGroup, TrainingSample
from rlinf_async.runtime.jobs.language.samples import Dispatcher
from rlinf_async.testing import explore
from rlinf_async.workers.inference import bare_sample


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


def test_ranks_get_equally_many_groups_and_nearly_as_many_tokens() -> None:
    def of(number: int, tokens: int) -> SampleGroup:
        return msgspec.structs.replace(group(number), samples=[sample(tokens)])

    async def body() -> None:
        groups = Channel(SampleGroup, name="groups", capacity=64)
        shares = Channel(DataShare, name="shares", capacity=8)
        dispatcher = Dispatcher(groups.sender, shares.receiver, batch=4)
        for number, tokens in enumerate((10, 20, 30, 40)):
            dispatcher.add(of(number, tokens))
        running = asyncio.create_task(dispatcher.run())
        await shares.sender.put(DataShare(boundary=Boundary(0, 0), ranks=2))
        found = [{(await groups.receiver.get(key=key)).group for _ in range(2)} for key in (0, 1)]
        assert found == [{3, 0}, {2, 1}]
        shares.close()
        await running
        groups.receiver.close()

    explore(body, seeds=range(5))


def sample(tokens: int) -> TrainingSample:
    return bare_sample(np.zeros(1, np.int32), np.zeros(tokens - 1, np.int32), index=0)
