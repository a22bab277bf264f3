"""What the tests of batch-resizing iterators share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from hypothesis import strategies as st

from rlinf_async.channels import Channel, Receiver
from rlinf_async.channels.batching import ListOps

Samples = list[int]

OPS: ListOps[int] = ListOps(length=lambda sample: sample)
"""Samples are whole numbers; as a length, a sample is its own value."""


def channel_of(capacity: int = 1000) -> Channel[Samples]:
    """An empty channel of lists of samples."""
    return Channel(list[int], name="batches", capacity=capacity)


def filled(batches: Iterable[Samples]) -> Receiver[Samples]:
    """The receiver of a channel that holds these batches and has ended."""
    channel = channel_of()
    for batch in batches:
        channel.sender.put_nowait(batch)
    channel.sender.close()
    return channel.receiver


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks run until the condition holds; pytest's timeout is the limit."""
    while not condition():  # noqa: ASYNC110  the channel has no event for 'somebody waits'
        await asyncio.sleep(0)


def cut(samples: Samples, places: Iterable[int]) -> list[Samples]:
    """The samples in batches that end at these places; equal places make empty batches."""
    edges = [0, *sorted(place % (len(samples) + 1) for place in places), len(samples)]
    return [samples[start:stop] for start, stop in pairwise(edges)]


def flat(batches: Iterable[Sequence[int]]) -> Samples:
    """All samples, in order."""
    return [sample for batch in batches for sample in batch]


places = st.lists(st.integers(0, 10_000), max_size=12)
"""Where an arrival is cut into batches."""


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """``micro_batch_size``, micro-batches in a global batch, global batches in a step, steps."""
    small = st.integers(1, 4)
    return draw(st.tuples(small, small, small, st.integers(1, 2)))


class MaxOverRanks:
    """An all-reduce with MAX between tasks of one loop."""

    def __init__(self, ranks: int) -> None:
        self._barrier = asyncio.Barrier(ranks)
        self._largest = 0

    async def __call__(self, value: int) -> int:
        await self._barrier.wait()  # everybody has read the last result
        self._largest = 0
        await self._barrier.wait()
        self._largest = max(self._largest, value)
        await self._barrier.wait()
        return self._largest
