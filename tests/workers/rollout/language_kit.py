"""Language rollout workers over the toy engine, and the channels around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

import rlinf_async as ra
from rlinf_async.backends.toy.config import ToyEngineConfig
from rlinf_async.backends.toy.engine import (
    ToyEngine,
    kept_tokens,
    response_length,
    response_tokens,
    text,
)
from rlinf_async.messages.language import Request, Sample, WeightsTaken
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.rollout.language import (
    LanguageRolloutConfig,
    LanguageRolloutReport,
    LanguageRolloutWorker,
)

SLOW = ToyEngineConfig(slots=4, seconds_per_step=1.0, mean_tokens=10)


class Rollout(LanguageRolloutWorker):
    """Over the toy engine, which the test can kill."""

    def __init__(
        self, engine: ToyEngineConfig, config: LanguageRolloutConfig | None = None, **options: Any
    ):
        super().__init__(engine, config, backend="toy", **options)

    async def kill_engine(self) -> None:
        """The engine dies with all it has."""
        engine = self._live.engine
        assert isinstance(engine, ToyEngine)
        engine.die()


def update(version: int) -> WeightUpdate:
    """Weights without tensors."""
    return WeightUpdate(version, (), 1000 + version)


def right(sample: Sample, config: ToyEngineConfig) -> None:
    """The sample is what the toy engine makes of its request, in however many pieces."""
    asked = sample.request
    length = min(response_length(config, asked.seed), asked.sampling.max_tokens)
    expected = response_tokens(config, asked, length)
    np.testing.assert_array_equal(sample.generated.token_ids, expected)
    assert sample.text == text(expected)
    assert len(sample.generated.version) == len(sample.generated.log_prob) == length
    assert sample.generated.version.min() >= asked.min_version
    assert sample.generated.finish in ("stop", "length")
    assert asked.partial is None
    kept, whole = sample.generated.kept, kept_tokens(config, asked, expected)
    assert (kept is None) == (whole is None) == (not asked.sampling.truncates)
    if kept is not None and whole is not None:
        np.testing.assert_array_equal(kept.counts, whole.counts)
        np.testing.assert_array_equal(kept.token_ids, whole.token_ids)


class Channels:
    """All channels around the rollout workers."""

    def __init__(
        self, cluster: ra.Cluster, capacity: int = 1000, *, stealing: bool = False
    ) -> None:
        self.requests = cluster.channel(
            Request, name="requests", capacity=capacity, stealing=stealing
        )
        self.samples = cluster.channel(Sample, name="samples", capacity=1000)
        self.weights = cluster.latest(WeightUpdate, name="weights")
        self.taken = cluster.channel(WeightsTaken, name="taken", capacity=100)

    async def ask(self, *requests: Request) -> None:
        """Put requests, and leave the channel open."""
        for one in requests:
            await self.requests.sender.put(one)

    def serve(
        self,
        rollout: ra.WorkerGroup[Any],
        ranks: Iterable[int] = (0,),
        *more: Any,
        method: Any = Rollout.serve,
        sticky: bool = False,
    ) -> ra.GroupCall[list[LanguageRolloutReport]]:
        """Have these ranks serve; ``more``: arguments of another method than `serve`."""
        return rollout.call_on(
            ranks,
            method,
            self.requests.receiver,
            self.samples.sender,
            self.weights.receiver,
            self.taken.sender,
            *more,
            sticky=sticky,
        )

    async def collect(self, count: int) -> dict[str, Sample]:
        """Take so many samples, by name."""
        samples = [await self.samples.receiver.get() for _ in range(count)]
        found = {sample.request.name: sample for sample in samples}
        assert len(found) == count, "a sample came twice"
        return found


Serving = tuple[Channels, ra.WorkerGroup[Any], ra.GroupCall[list[LanguageRolloutReport]]]
"""The channels, the workers, and their call of `serve`."""


@asynccontextmanager
async def served(worker: type[Rollout], *args: Any) -> AsyncIterator[Serving]:
    """A worker in this process that serves, with weights of version 0."""
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rollout = await cluster.launch(worker, *args)
        serving = channels.serve(rollout)
        await channels.weights.sender.publish(update(0))
        yield channels, rollout, serving
