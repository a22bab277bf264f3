"""Micro-batches go from the rank that reads them to the ranks that hold the rest of its model.

::

    arriving --> reading rank --Lane--> tensor ranks and stages of its model
                     |   first and last one: do all readers have theirs?
                     +----Readers----> reading ranks of other models

Sending does not wait for the receivers: in a pipeline the first stage reads ahead of the others,
which first wait for what it computes.

An error of a reading rank travels in place of a micro-batch, to all ranks of all models: no data
rank is given its first one, or its last, before every other one has its own. Parameters are
gathered from data ranks with the first one (where that overlaps with computing) and gradients
reduced over them with the last, so nobody waits there for a rank that gave up, or for samples that
are still to come. The step ends no later for it: it needs the last samples of every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

from rlinf_async.backends.language import MicroBatch
from rlinf_async.backends.megatron.errors import NoSamples
from rlinf_async.backends.megatron.lane import Failure, Lane
from rlinf_async.backends.megatron.readers import Readers

T = TypeVar("T")


class Feed:
    """The ranks of one model.

    Args:
        lane: between them.
        readers: of all models, on the rank that reads.
    """

    def __init__(self, lane: Lane, readers: Readers) -> None:
        self._lane, self._readers = lane, readers

    @property
    def _reads(self) -> bool:
        return self._lane.alone or self._lane.first

    def share(
        self,
        micro_batches: Iterable[MicroBatch],
        prepare: Callable[[MicroBatch], T],
        *,
        counted: bool,
    ) -> Iterator[T]:
        """Yield what ``prepare`` makes of the micro-batches of one global batch, on every rank;
        only one rank's are read.

        ``counted``: every one says how many there are, if need be once all were read.

        An error of reading or preparing is raised on every rank as `RankFailed`; where there is one
        rank, as it is. Raises `NoSamples` on every rank where one that reads has none.
        """
        if not self._reads:
            yield from map(prepare, self._received())
            return
        self._readers.begin()
        arriving = _counted(micro_batches) if counted else iter(micro_batches)
        first, last = True, False
        while not last:
            try:
                one = next(arriving, None)
                if one is None:
                    raise NoSamples
                last, ready = one.is_last, prepare(one)
                if first or last:
                    self._readers.exchange([])
                first = False
            except Exception as error:
                self.fail(error)
            self._lane.send(one)
            yield ready

    def fail(self, error: Exception) -> NoReturn:
        """Raise `RankFailed` on all ranks of all models, in place of the next micro-batch."""
        if not self._readers.alone:
            self._tell(self._readers.fail(error), error)
        self.fail_model(error)

    def fail_model(self, error: Exception) -> NoReturn:
        """Raise `RankFailed` on all ranks of this model, in place of what is shared next."""
        if self._lane.alone:
            raise error
        self._tell(Failure.of(error), error)

    def _tell(self, failure: Failure, error: Exception) -> NoReturn:
        self._lane.send(failure)
        self.finish()
        raise failure.error() from error

    def finish(self) -> None:
        """Wait until the others have what was shared with them."""
        self._lane.finish()

    def broadcast(self, value: T, kind: Any, source: int | None = None) -> T:
        """Return the value, of this type, of one rank; of the reading one if not said.
        Collective.

        The others' values are not looked at. A value that cannot travel is a `RankFailed` on every
        rank.
        """
        lane = self._lane
        if lane.alone:
            return value
        source = lane.ranks[0] if source is None else source
        if source in lane.others:
            found: T = self._receive(kind, source)
            return found
        try:
            lane.send(value)
        except TypeError as error:
            self.fail_model(error)
        self.finish()
        return value

    def _received(self) -> Iterator[MicroBatch]:
        last = False
        while not last:
            one = self._receive(MicroBatch, self._lane.ranks[0])
            last = one.is_last
            yield one

    def _receive(self, kind: type[T], source: int) -> T:
        found = self._lane.receive(kind, source)
        if isinstance(found, Failure):
            raise found.error()
        return found


def _counted(micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    arriving = iter(micro_batches)
    first = next(arriving, None)
    if first is None:
        return
    if first.of is not None:
        yield first
        yield from arriving
        return
    every = [first, *arriving]
    for one in every:
        yield one._replace(of=len(every))
