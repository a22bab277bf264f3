"""Ends a run that has given an item up: what waits for it would wait for ever.

A ticket or a question that a death interrupts is delivered again. The restart policy is meant to
speak first, so an item may be delivered more often than its holders may die in a minute; one whose
holders die slowly, again and again, is given up all the same, and then the run ends and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from rlinf_async.channels import Channel
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.stall import internal

PERIOD = 0.25
"""seconds"""
SPARE = 5
"""deliveries beyond those that the restart policy allows for"""


class ItemLost(RuntimeError):
    """A ticket or a question was given up; the message names the channel and the last failure."""


def deliveries(holders: int, max_restarts: int) -> int:
    """How often to deliver an item that ``holders`` workers take turns in dying of."""
    return holders * max_restarts + SPARE


@contextmanager
def ended_by_lost_items(cluster: Cluster) -> Iterator[None]:
    """While the block runs, an item that was given up aborts the cluster with `ItemLost`."""
    watching = internal(asyncio.create_task(_watch(cluster), name="lost items"))
    try:
        yield
    finally:
        watching.cancel()


async def _watch(cluster: Cluster) -> None:
    while True:
        lost = _first_lost(cluster)
        if lost is not None:
            return cluster.abort(lost)
        await asyncio.sleep(PERIOD)


def _first_lost(cluster: Cluster) -> ItemLost | None:
    for channel in cluster.channels.values():
        if isinstance(channel, Channel) and channel.dead_letters:
            letter = channel.dead_letters[0]
            return ItemLost(
                f"channel {channel.name!r}: {type(letter.item).__name__} was given up after "
                f"{letter.deliveries} deliveries, the last of which ended with: {letter.error}. "
                "See in the log why the workers that took it died, and go on with --resume"
            )
    return None
