"""What ranks tell each other that is no tensor: messages over gloo, from one rank to another.

Receiving waits as long as it takes: samples come when rollouts have made them, which says nothing
of the rank that reads them. A process that is gone is noticed all the same, by its connection. (The
limit of a group, 30 minutes, would be one for rollouts; and for what gloo sends from rank to rank
it cannot be changed once the group is made.)
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_async.backends.language import RankFailed
from rlinf_async.backends.megatron.errors import NoSamples
from rlinf_async.backends.megatron.objects import decode, encode

T = TypeVar("T")

NO_LIMIT: Final = timedelta(days=3650)


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sent in place of what a rank was to give."""

    rank: int
    cause: str
    no_samples: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return what this rank says of its error."""
        cause = f"{type(error).__name__}: {error}"
        return cls(dist.get_rank(), cause, isinstance(error, NoSamples))

    def error(self) -> Exception:
        """Return what every rank raises."""
        if self.no_samples:
            return NoSamples()
        return RankFailed(f"rank {self.rank}, which others wait for, failed: {self.cause}")


class Lane:
    """The ranks of a gloo group; None: this one is alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        alone = group is None or dist.get_world_size(group) == 1
        self._group = None if alone else group
        self.ranks = [] if self._group is None else dist.get_process_group_ranks(self._group)
        """of the group, numbered as all launched ones are; none where this one is alone"""
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
        data = _tensor(encode(value))
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

    def receive(self, kind: type[T] | Any, source: int) -> T | Failure:
        """Return the next value, of this type, that a rank has sent to this one, or that it failed.

        Raises the `RuntimeError` of torch when that rank is gone.
        """
        size = torch.zeros(1, dtype=torch.int64)
        self._receive(size, source)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._receive(data, source)
        found: T | Failure = decode(data.numpy().tobytes(), kind | Failure)
        return found

    def _receive(self, tensor: Tensor, source: int) -> None:
        work = dist.irecv(tensor, source, group=self._group)
        assert work is not None
        work.wait(NO_LIMIT)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
