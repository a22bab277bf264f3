"""What ends a run before its time, beside an error of a worker's call.

- An item that was given up: whoever waits for it would wait for ever. A ticket or a question that a
  death interrupts is delivered again. The restart policy is meant to give up first, so an item may
  be delivered more often than its holders may die in a minute; an item whose holders die slowly,
  again and again, is given up all the same.
- A task of the driver that nobody awaits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from rlinf_async.channels import Channel
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.signals import Terminated
from rlinf_async.runtime.stall import internal

PERIOD = 0.25
"""seconds between two looks for items that were given up"""
SPARE = 5
"""deliveries beyond those that the restart policy allows for"""


class ItemLost(RuntimeError):
    """An item was given up; the message names the channel and the last failure."""


def max_deliveries(holders: int, max_restarts: int) -> int:
    """How often to deliver an item that ``holders`` workers die of one after the other."""
    return holders * max_restarts + SPARE


@contextmanager
def abort_on_lost_items(cluster: Cluster) -> Iterator[None]:
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


def start_background(
    cluster: Cluster, work: Coroutine[Any, Any, None], name: str
) -> asyncio.Task[None]:
    """Start a task of the driver; if it fails, the cluster ends with its error."""
    task = asyncio.create_task(work, name=name)

    def ended(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            cluster.abort(error)

    task.add_done_callback(ended)
    return task


@contextmanager
def in_background(cluster: Cluster, work: Coroutine[Any, Any, None], name: str) -> Iterator[None]:
    """`start_background` for the time of a block; what is not done by then is cancelled."""
    task = start_background(cluster, work, name)
    try:
        yield
    finally:
        task.cancel()


class Stopped(NamedTuple):
    """How a run ended that did not come to its end."""

    outcome: Literal["stopped", "terminated", "failed"]
    error: str | None
    """the first cause, of a run that failed"""

    @classmethod
    def by(cls, error: BaseException) -> Stopped:
        """The outcome of a run that this error ended."""
        if isinstance(error, Terminated):
            return cls("terminated", None)
        if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
            return cls("stopped", None)
        return cls("failed", f"{type(error).__name__}: {error}")
