"""Workers whose runs are recorded and played again."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async import (
    EndOfChannel,
    LatestReceiver,
    LatestSender,
    Receiver,
    Sender,
    Worker,
)


class Number(msgspec.Struct):
    """A number of an iteration."""

    value: float
    iteration: int = 0
    whole: int = 0


class Weights(msgspec.Struct):
    """What a learner publishes."""

    version: int
    data: NDArray[np.float32]


drift = 0.0
"""what every worker here adds to what it puts: a test changes it to have a replay differ"""
surplus = 0
"""items that a worker puts beyond those that it was asked for; below 0: so many fewer"""


class Adder(Worker):
    """Adds up what it gets: it has a state."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.total = 0.0

    async def run(self, numbers: Receiver[Number], sums: Sender[Number]) -> float:
        async for number in numbers:
            self.total += self.factor * number.value
            if surplus >= 0 or number.iteration < 9:
                await sums.put(
                    Number(self.total + drift, number.iteration, number.whole), key=number.iteration
                )
        for _ in range(surplus):
            await sums.put(Number(self.total), key=0)
        return self.total

    async def run_failing(self, numbers: Receiver[Number], sums: Sender[Number]) -> float:
        """As `run`, until a number is negative."""
        async for number in numbers:
            if number.value < 0:
                raise ValueError(f"a number of iteration {number.iteration} is negative")
            self.total += number.value
            await sums.put(Number(self.total, number.iteration), key=number.iteration)
        return self.total

    async def batches(self, numbers: Receiver[Number], sums: Sender[Number], key: int) -> int:
        """Sums of whatever is there."""
        count = 0
        try:
            while True:
                batch = await numbers.get_batch(weight=8, at_least=1, key=key)
                count += 1
                await sums.put(Number(sum(one.value for one in batch), len(batch)), key=key)
        except EndOfChannel:
            return count

    async def leases(self, numbers: Receiver[Number], sums: Sender[Number]) -> list[int]:
        """Leases; every third fails once, and is delivered again."""
        deliveries: list[int] = []
        try:
            while True:
                try:
                    async with numbers.lease(weight=3, at_least=1) as batch:
                        deliveries += batch.deliveries
                        if max(batch.deliveries) == 1 and any(one.whole % 3 == 0 for one in batch):
                            raise RuntimeError("this lease fails")
                        await sums.put(Number(sum(one.value for one in batch), batch[0].whole))
                except RuntimeError:
                    continue
        except EndOfChannel:
            return deliveries

    async def poll(self, numbers: Receiver[Number], sums: Sender[Number], wanted: int) -> int:
        """Take without waiting; only where the channel lives in this process."""
        from rlinf_async.channels import ChannelEmpty

        found = 0
        while found < wanted:
            try:
                number = numbers.get_nowait()
            except ChannelEmpty:
                await asyncio.sleep(0)
                continue
            found += 1
            await sums.put(Number(number.value, found))
        return found


class Learner(Worker):
    """Publishes weights that depend on what it got."""

    def __init__(self) -> None:
        self.weights = np.zeros(4, np.float32)
        self.version = 0

    async def learn(
        self, numbers: Receiver[Number], count: int, weights: LatestSender[Weights]
    ) -> float:
        """One iteration."""
        for _ in range(count):
            number = await numbers.get()
            self.weights = self.weights + np.float32(number.value)
        self.version += 1
        data = self.weights + np.float32(drift)
        await weights.publish(Weights(self.version, data))
        return float(self.weights.sum())


class Follower(Worker):
    """Multiplies by the weights that are newest."""

    async def follow(
        self, numbers: Receiver[Number], products: Sender[Number], weights: LatestReceiver[Weights]
    ) -> int:
        newest = await weights.get()
        done = 0
        async for number in numbers:
            while newest.version < number.whole:
                newest = await weights.get()
            await products.put(Number(number.value * float(newest.data[0]), newest.version))
            done += 1
        return done


class Blob(msgspec.Struct):
    """Bytes that cannot be compressed, of an iteration."""

    data: bytes
    iteration: int


class Keeping(Worker):
    """Gives back the last bytes of what it gets."""

    async def run(self, blobs: Receiver[Blob], ends: Sender[Number]) -> int:
        done = 0
        async for blob in blobs:
            await ends.put(Number(float(blob.data[-1]), blob.iteration))
            done += 1
        return done


class Passing(Keeping):
    """As it, and it has no state."""

    stateless = True
