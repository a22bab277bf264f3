"""Micro-batches go from the rank that reads them to the ranks that hold the rest of its model.

::

    arriving --> reading rank --`GroupMessages`--> tensor ranks and stages of its model
                     |   first and last one: do all readers have theirs?
                     +----`Readers`----> reading ranks of other models

Sending does not wait for the receivers: in a pipeline the first stage reads ahead of the others,
which first wait for what it computes.

An error of a reading rank travels in place of a micro-batch, to all ranks of all models: no data
rank is given its first one, or its last, before every other one has its own. Parameters are
gathered from data ranks with the first one (where that overlaps with computing) and gradients
reduced over them with the last, so nobody waits there for a rank that gave up, or for samples that
are still to come. The step ends no later for it: it needs the last samples of every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, NoReturn, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_async.backends.language import MicroBatch, RankFailed
from rlinf_async.backends.megatron.config import NoSamples

T = TypeVar("T")

NO_LIMIT: Final = timedelta(days=3650)


class ReadFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sent in place of what a rank was to give."""

    rank: int
    cause: str
    no_samples: bool = False

    @classmethod
    def of(cls, error: BaseException) -> ReadFailure:
        """Return what this rank says of its error."""
        cause = f"{type(error).__name__}: {error}"
        return cls(dist.get_rank(), cause, isinstance(error, NoSamples))

    def error(self) -> Exception:
        """Return what every rank raises."""
        if self.no_samples:
            return NoSamples()
        return RankFailed(f"rank {self.rank}, which others wait for, failed: {self.cause}")


class GroupMessages:
    """Messages between the ranks of a gloo group, for what is no tensor; None: this one is alone.

    Receiving waits as long as it takes: samples come when rollouts have made them, which says
    nothing of the rank that reads them. A process that is gone is noticed all the same, by its
    connection. (The limit of a group, 30 minutes, would be one for rollouts; and for what gloo
    sends from rank to rank it cannot be changed once the group is made.)
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        alone = group is None or dist.get_world_size(group) == 1
        self._group = None if alone else group
        self.ranks = [] if self._group is None else dist.get_process_group_ranks(self._group)
        """ranks of the group, numbered as all launched ones are; none where this one is alone"""
        self._sending: list[tuple[dist.Work, Tensor]] = []

    @property
    def alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self._group is None

    @property
    def first(self) -> bool:
        """Whether this is the first rank of the group."""
        return self.ranks[:1] == [dist.get_rank()]

    @property
    def others(self) -> list[int]:
        """The ranks but this one."""
        return [rank for rank in self.ranks if rank != dist.get_rank()]

    def send(self, value: Any, ranks: Iterable[int] | None = None) -> None:
        """Send a value, to all others if not said to whom, without waiting for them.

        Raises `TypeError`, and sends nothing, if it cannot travel.
        """
        data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        for rank in self.others if ranks is None else ranks:
            for tensor in (size, data):
                work = dist.isend(tensor, rank, group=self._group)
                assert work is not None
                self._sending.append((work, tensor))

    def finish(self) -> None:
        """Wait until the others have what was sent."""
        sending, self._sending = self._sending, []
        for work, _ in sending:
            work.wait(NO_LIMIT)

    def receive(self, kind: type[T] | Any, source: int) -> T | ReadFailure:
        """Return the next value, of this type, that a rank has sent to this one, or that it failed.

        Raises the `RuntimeError` of torch when that rank is gone.
        """
        size = torch.zeros(1, dtype=torch.int64)
        self._receive(size, source)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._receive(data, source)
        found: T | ReadFailure = decode(data.numpy().tobytes(), kind | ReadFailure)
        return found

    def _receive(self, tensor: Tensor, source: int) -> None:
        work = dist.irecv(tensor, source, group=self._group)
        assert work is not None
        work.wait(NO_LIMIT)


class Readers:
    """The ranks that read samples, one of each data rank, as one of them sees them.

    They exchange numbers while they read a global batch, and at its end that each has all of it.
    Every exchange is one of all of them, in the same order, so a rank that failed says so in the
    place of its next one, and all have failed then: none goes on to collectives of a global batch
    that others have given up.
    """

    def __init__(self, peers: GroupMessages) -> None:
        self._peers = peers
        self._failure: ReadFailure | None = None
        """failure of the global batch that is read, which all readers know"""

    @property
    def alone(self) -> bool:
        """Whether no other rank reads."""
        return self._peers.alone

    def begin(self) -> None:
        """Begin a global batch."""
        self._failure = None

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all of them, by data rank. Collective among the ranks that read.

        Raises what `ReadFailure.error` says if any of them failed.
        """
        every = self._exchange(list(numbers))
        if self._failure is not None:
            raise self._failure.error()
        return [one for one in every if not isinstance(one, ReadFailure)]

    def fail(self, error: BaseException) -> ReadFailure:
        """Have all of them fail, unless this error came from an exchange; return what all raise."""
        own = ReadFailure.of(error)
        if self._failure is None:
            self._exchange(own)
        return self._failure or own

    def _exchange(self, own: list[float] | ReadFailure) -> list[list[float] | ReadFailure]:
        peers = self._peers
        every: list[list[float] | ReadFailure] = [own]
        try:
            peers.send(own)
            others = {rank: peers.receive(list[float], rank) for rank in peers.others}
            peers.finish()
            every = [others.get(rank, own) for rank in peers.ranks] or [own]
        except RuntimeError as error:  # one of them is gone: this rank's model has to hear of it
            every = [ReadFailure.of(error)]
        self._failure = next((one for one in every if isinstance(one, ReadFailure)), None)
        return every


class Feed:
    """The ranks of one model.

    Args:
        peers: between them.
        readers: readers of all models, on the rank that reads.
    """

    def __init__(self, peers: GroupMessages, readers: Readers) -> None:
        self._peers, self._readers = peers, readers

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
        if not (self._peers.alone or self._peers.first):
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
            self._peers.send(one)
            yield ready

    def fail(self, error: Exception) -> NoReturn:
        """Raise `RankFailed` on all ranks of all models, in place of the next micro-batch."""
        if not self._readers.alone:
            self._send_failure(self._readers.fail(error), error)
        self.fail_model(error)

    def fail_model(self, error: Exception) -> NoReturn:
        """Raise `RankFailed` on all ranks of this model, in place of what is shared next."""
        if self._peers.alone:
            raise error
        self._send_failure(ReadFailure.of(error), error)

    def _send_failure(self, failure: ReadFailure, error: Exception) -> NoReturn:
        self._peers.send(failure)
        self.finish()
        raise failure.error() from error

    def finish(self) -> None:
        """Wait until the others have what was shared with them."""
        self._peers.finish()

    def broadcast(self, value: T, kind: Any, source: int | None = None) -> T:
        """Return the value, of this type, of one rank; of the reading one if not said.
        Collective.

        The others' values are not looked at. A value that cannot travel is a `RankFailed` on every
        rank.
        """
        peers = self._peers
        if peers.alone:
            return value
        source = peers.ranks[0] if source is None else source
        if source in peers.others:
            found: T = self._receive(kind, source)
            return found
        try:
            peers.send(value)
        except TypeError as error:
            self.fail_model(error)
        self.finish()
        return value

    def _received(self) -> Iterator[MicroBatch]:
        last = False
        while not last:
            one = self._receive(MicroBatch, self._peers.ranks[0])
            last = one.is_last
            yield one

    def _receive(self, kind: type[T], source: int) -> T:
        found = self._peers.receive(kind, source)
        if isinstance(found, ReadFailure):
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


def encode(value: object) -> bytes:
    """Return a value of plain types, structs and numpy arrays as bytes.

    Raises `TypeError` for anything else, and for arrays of objects.
    """
    return msgspec.msgpack.encode(value, enc_hook=_outline)


def decode(data: bytes, kind: Any) -> Any:
    """Return the value, checked to be of this type; its arrays are its own, and writable.

    Raises `msgspec.DecodeError` for bytes of another type.
    """
    return _decoder(kind).decode(data)


@lru_cache(maxsize=16)
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_array)


def _outline(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        raise TypeError(f"{type(value).__name__} does not travel between the ranks of a model")
    return value.dtype.str, value.shape, value.tobytes()


def _array(_: Any, outline: Any) -> Any:
    dtype, shape, elements = msgspec.convert(outline, tuple[str, tuple[int, ...], bytes])
    return np.frombuffer(bytearray(elements), dtype).reshape(shape)
