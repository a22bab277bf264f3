"""How buckets are moved: as messages of the process group, or through shared memory of one host.

::

    Collective     pack -> isend ............ irecv -> check, unpack         any hosts, any device
    SharedMemory   pack into own memory, send the place -> check, unpack from the peer's memory
                   the peer sends when it is done, and the memory is reused       one host, CPU

`SharedMemory`: see `shared_memory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_async.backends.reshard import buckets
from rlinf_async.backends.reshard.buckets import DtypeOf
from rlinf_async.backends.reshard.errors import PeerLost
from rlinf_async.parallel import Run

Runs = Mapping[int, Sequence[Run]]
"""by peer"""


class Transport(Protocol):
    """Two steps of each round, and an end."""

    peak: int
    """largest size of all buckets at one time, in bytes"""

    def begin(
        self, now: int, outgoing: Runs, incoming: Runs, old: Mapping[str, Tensor], as_: DtypeOf
    ) -> None:
        """Pack and send the buckets of a round. Raises `PeerLost`, as the others do."""
        ...

    def arrivals(self, now: int, incoming: Runs, as_: DtypeOf) -> Iterator[tuple[int, Tensor]]:
        """Yield each peer's bucket, which is valid until the next one is asked for."""
        ...

    def finish(self) -> None:
        """Wait until no peer reads this rank's buckets any more."""
        ...

    def close(self) -> None:
        """Free everything; peers that still wait for this rank get `PeerLost`."""
        ...


class Collective:
    """Sends buckets as messages of the process group."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta
    ) -> None:
        self._messages = _Messages(group, timeout)
        self._device = device
        self._arriving: dict[int, Tensor] = {}
        self._leaving: list[Tensor] = []
        self._works: list[dist.Work] = []
        self.peak = 0

    def begin(
        self, now: int, outgoing: Runs, incoming: Runs, old: Mapping[str, Tensor], as_: DtypeOf
    ) -> None:
        self._arriving = {peer: self._allocate(runs, as_) for peer, runs in incoming.items()}
        leaving = {peer: self._allocate(runs, as_) for peer, runs in outgoing.items()}
        for peer, bucket in leaving.items():
            buckets.seal(bucket, buckets.pack(bucket, outgoing[peer], old, as_), now)
        self._leaving = list(leaving.values())
        self.peak = max(self.peak, sum(map(len, [*self._leaving, *self._arriving.values()])))
        self._works = self._messages.post(now, leaving, self._arriving)

    def arrivals(self, now: int, incoming: Runs, as_: DtypeOf) -> Iterator[tuple[int, Tensor]]:
        self._messages.wait(self._works, now, incoming)
        self._leaving = []
        yield from self._arriving.items()
        self._arriving = {}

    def finish(self) -> None:
        return

    def close(self) -> None:
        return

    def _allocate(self, runs: Sequence[Run], as_: DtypeOf) -> Tensor:
        size = buckets.bucket_bytes(runs, as_)
        return torch.empty(size, dtype=torch.uint8, device=self._device)


class _Messages:
    """Sends and receives of a group; its errors become `PeerLost`."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout

    def post(
        self, now: int, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]
    ) -> list[dist.Work]:
        operations = [
            dist.P2POp(kind, tensor, group=self._group, group_peer=peer)
            for kind, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
            for peer, tensor in tensors.items()
        ]
        if not operations:
            return []
        try:
            return dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise PeerLost(_lost(now, [*outgoing, *incoming])) from error

    def wait(self, works: Iterable[dist.Work], now: int, peers: Iterable[int]) -> None:
        try:
            for work in works:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise PeerLost(_lost(now, peers)) from error


def _lost(now: int, peers: Iterable[int]) -> str:
    return (
        f"round {now}: rank {sorted(set(peers))} or the way to it was lost, or nothing came in "
        "time; the old buffers are as they were"
    )
