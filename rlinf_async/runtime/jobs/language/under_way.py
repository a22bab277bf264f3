"""What is under way when a checkpoint is written, so that a resumed run begins none of it anew.

::

    rollout workers --requests with the tokens they have by now--+
    generated, looked over: samples that wait for their score ---+--> Waiting, into the checkpoint
    scored: samples that wait for the collector -----------------+

What is in nobody's hands just then is in the ledger all the same, as a request that was admitted:
it is asked for again. So none of this has to be complete, and none of it can be wrong: whatever
the ledger does not know to be running is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from rlinf_async.channels import Channel
from rlinf_async.channels.encoded import copy_of
from rlinf_async.messages.language import Request, Sample, ScoredSample
from rlinf_async.runtime.jobs.language.graph import Graph
from rlinf_async.runtime.jobs.language.ledger import Ledger

T = TypeVar("T")


class Waiting(msgspec.Struct, kw_only=True):
    """Samples on their way, each of them in one place only."""

    partial: list[Request] = []
    """with tokens to go on after"""
    generated: list[Sample] = []
    looked_over: list[Sample] = []
    """with log-probs of the actor's forward"""
    scored: list[ScoredSample] = []

    @property
    def names(self) -> set[str]:
        """Of the samples that need no rollout any more."""
        return {one.request.name for one in (*self.generated, *self.looked_over)}

    def book(self, ledger: Ledger) -> None:
        """Tell the ledger of a resumed run what need not begin anew."""
        for request in self.partial:
            ledger.go_on(request)
        for scored in self.scored:
            ledger.take(scored)


def waiting(graph: Graph, partial: Iterable[Request], running: Iterable[Request]) -> Waiting:
    """Everything that is under way, in the farthest place that each sample has come to.

    Args:
        graph: the run's channels, as they are now.
        partial: what the rollout workers have.
        running: what the ledger waits for; nothing else is taken up.
    """
    left = {one.name for one in running}

    def new(name: str) -> bool:
        known = name in left
        left.discard(name)
        return known

    scored = [one for one in _items(graph.scored) if new(one.sample.request.name)]
    looked_over: list[Sample] = []
    if graph.looked_over is not graph.generated:
        looked_over = [one for one in _items(graph.looked_over) if new(one.request.name)]
    return Waiting(
        scored=scored,
        looked_over=looked_over,
        generated=[one for one in _items(graph.generated) if new(one.request.name)],
        partial=[one for one in partial if one.partial is not None and new(one.name)],
    )


async def put_back(graph: Graph, waiting: Waiting) -> None:
    """Put the samples of a resumed run where they were. Its workers have begun to take them."""
    for channel, samples in (
        (graph.generated, waiting.generated),
        (graph.looked_over, waiting.looked_over),
    ):
        if samples:
            with channel.new_sender() as sender:
                for sample in samples:
                    await sender.put(sample)


def _items(channel: Channel[T]) -> list[T]:
    """What waits in a channel or is leased from it. Nothing is taken."""
    queue = channel.queue
    found: list[Any] = [queue.value(copy_of(item)) for item in queue.contents()]
    return found
