"""Micro-batches of a global batch, and what becomes of their metrics.

::

                            waits for                           unblocked by
    all_micro_batches       a whole global batch, on the loop   the collector
    arriving_micro_batches  the next one, in the compute        the collector
                            thread
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from rlinf_async.backends.language import MicroBatch
from rlinf_async.channels import BatchResizingIterator, Channel
from rlinf_async.channels.batching import BatchSizes, BlockingBatches, HandlerFailed
from rlinf_async.messages.language import SampleGroup

Batches = BatchResizingIterator[SampleGroup]
Waiting = Callable[[], AbstractContextManager[None]]
"""around each wait for a micro-batch"""


def is_spent(steps: Sequence[Mapping[str, float]]) -> bool:
    """Whether the early stop (``early_stop_ratio``) stopped every sample of an epoch.

    Another epoch would then have no gradient.
    """
    return all(step.get("early_stopped", 0.0) >= 1.0 for step in steps)


def means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means over the steps that measured it: one without any gradient has fewer metrics.

    Of the gradient norm only over those where it is finite, if there are any.
    """
    found = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        numbers = [step[name] for step in steps if name in step]
        if name == "grad_norm":
            numbers = [number for number in numbers if math.isfinite(number)] or numbers
        found[name] = sum(numbers) / len(numbers)
    return found


def channel_of(groups: Sequence[SampleGroup], name: str) -> Channel[SampleGroup]:
    """Return a channel of this process with these groups in it."""
    channel = Channel(SampleGroup, name=name, capacity=len(groups))
    for group in groups:
        channel.sender.put_nowait(group)
    return channel


async def all_micro_batches(batches: Batches, waiting: Waiting) -> list[MicroBatch]:
    """Wait for a whole global batch on the loop."""
    with waiting():
        try:
            parts = [one.samples async for one in batches.global_batch()]
        except HandlerFailed as failed:
            raise (failed.__cause__ or failed) from None
    last = len(parts) - 1
    return [MicroBatch(one, at == last, len(parts)) for at, one in enumerate(parts)]


def arriving_micro_batches(
    batches: Batches, view: BlockingBatches[SampleGroup], waiting: Waiting, sizes: BatchSizes
) -> Iterator[MicroBatch]:
    size = sizes.micro_batch_size
    count = None if size is None else sizes.global_batch_size // size
    last = False
    micro_batches = view.global_batch()
    while not last:
        with waiting():
            try:
                micro_batch = next(micro_batches)
            except HandlerFailed as failed:
                raise (failed.__cause__ or failed) from None
        last = batches.finished_global_batch
        yield MicroBatch(micro_batch.samples, last, count)
