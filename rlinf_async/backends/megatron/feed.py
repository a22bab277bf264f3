"""Micro-batches go from the rank that reads them to the ranks that hold the rest of its model.

Sending does not wait for the receivers: in a pipeline the first stage reads ahead of the others,
which first wait for what it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_async.backends.language import MicroBatch
from rlinf_async.backends.megatron.objects import decode, encode

NO_SAMPLES: Final = (
    "a global batch has no samples on a rank that reads them: give every data rank at least one"
)


class Feed:
    """The ranks of one model, over a gloo group of theirs; None: there is one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._ranks = [] if self._group is None else dist.get_process_group_ranks(self._group)
        self._sending: list[tuple[dist.Work, Tensor]] = []

    @property
    def _reads(self) -> bool:
        return self._group is None or dist.get_rank() == self._ranks[0]

    def share(self, micro_batches: Iterable[MicroBatch], *, counted: bool) -> Iterator[MicroBatch]:
        """Yield the micro-batches of one global batch on every rank; only one rank's are read.

        ``counted``: every one says how many there are, if need be once all were read.

        Raises `ValueError` on every rank where there are none.
        """
        if not self._reads:
            yield from self._received()
            return
        arriving = iter(micro_batches)
        first = next(arriving, None)
        if first is None:
            self._send(None)
            self.finish()
            raise ValueError(NO_SAMPLES)
        every: Iterator[MicroBatch] = chain([first], arriving)
        for one in _counted(every) if counted else every:
            self._send(one)
            yield one

    def finish(self) -> None:
        """Wait until the others have what was shared with them."""
        sending, self._sending = self._sending, []
        for work, _ in sending:
            work.wait()

    def broadcast(self, value: Any, kind: Any, source: int | None = None) -> Any:
        """Return the value, of this type, of one rank; of the reading one if not said.
        Collective.

        The others' values are not looked at. A rank that has no value which could travel raises
        `TypeError`, and the others `ValueError`.
        """
        if self._group is None:
            return value
        source = self._ranks[0] if source is None else source
        if dist.get_rank() != source:
            return self._announced(kind, source)
        data = b""
        try:
            data = encode(value)
        finally:
            self._announce(data, source)
        return value

    def _announce(self, data: bytes, source: int) -> None:
        """Empty: there is nothing to come."""
        size = torch.tensor([len(data)])
        dist.broadcast(size, source, group=self._group)
        if data:
            dist.broadcast(_tensor(data), source, group=self._group)

    def _announced(self, kind: Any, source: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, source, group=self._group)
        if not int(size):
            raise ValueError(f"rank {source} has nothing that could travel: see its own error")
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, source, group=self._group)
        return decode(data.numpy().tobytes(), kind)

    def _received(self) -> Iterator[MicroBatch]:
        last = False
        while not last:
            one = self._receive()
            if one is None:
                raise ValueError(NO_SAMPLES)
            last = one.is_last
            yield one

    def _send(self, one: MicroBatch | None) -> None:
        """None: there are no micro-batches."""
        data = _tensor(encode(one))
        size = torch.tensor([len(data)])
        for rank in self._ranks[1:]:
            for tensor in (size, data):
                work = dist.isend(tensor, rank, group=self._group)
                assert work is not None
                self._sending.append((work, tensor))

    def _receive(self) -> MicroBatch | None:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, self._ranks[0], group=self._group)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, self._ranks[0], group=self._group)
        one: MicroBatch | None = decode(data.numpy().tobytes(), MicroBatch | None)
        return one


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _counted(micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    arriving = iter(micro_batches)
    first = next(arriving)
    if first.of is not None:
        yield first
        yield from arriving
        return
    every = [first, *arriving]
    for one in every:
        yield one._replace(of=len(every))
