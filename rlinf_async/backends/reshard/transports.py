"""How buckets get from rank to rank: through the process group, or through memory of one host.

::

    Collective     pack -> isend ............ irecv -> check, unpack         any hosts, any device
    SharedMemory   pack into own memory; isend where it is -> check, unpack from the peer's memory
                   the peer says when it is done, and the memory is used again     one host, CPU

A rank's memory has two slots, so that it packs a round while peers still read the one before. The
memory has no name, so a kill leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
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
PLACE, DONE = 1, 2
"""tags of messages"""


class Transport(Protocol):
    """Two steps of each round, and an end."""

    peak: int
    """the most bytes that buckets took at one time"""

    def begin(
        self, now: int, outgoing: Runs, incoming: Runs, old: Mapping[str, Tensor], as_: DtypeOf
    ) -> None:
        """Pack and send the buckets of a round. Raises `PeerLost`, as the others do."""
        ...

    def arrivals(self, now: int, incoming: Runs, as_: DtypeOf) -> Iterator[tuple[int, Tensor]]:
        """Yield each peer's bucket, which is valid until the next one is asked for."""
        ...

    def finish(self) -> None:
        """Wait until nobody reads this rank's buckets any more."""
        ...


class Collective:
    """Buckets are messages of the process group."""

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
        self._arriving = {peer: self._room(runs, as_) for peer, runs in incoming.items()}
        leaving = {peer: self._room(runs, as_) for peer, runs in outgoing.items()}
        for peer, bucket in leaving.items():
            buckets.pack(bucket, outgoing[peer], old, as_)
            buckets.seal(bucket, now)
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

    def _room(self, runs: Sequence[Run], as_: DtypeOf) -> Tensor:
        size = buckets.bucket_bytes(runs, as_)
        return torch.empty(size, dtype=torch.uint8, device=self._device)


class SharedMemory:
    """Buckets lie in memory that all ranks of the host see. Made by `meet`."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout: timedelta,
        mine: Tensor,
        peers: Mapping[int, Tensor],
    ) -> None:
        self._messages = _Messages(group, timeout)
        self._mine, self._peers = mine, peers
        self._turn = 0
        self._busy: tuple[list[dist.Work], ...] = ([], [])
        self._places: dict[int, Tensor] = {}
        self._works: list[dist.Work] = []
        self._held: list[list[Tensor]] = [[], []]
        """of each slot: the messages in flight"""
        self.peak = len(mine)

    def begin(
        self, now: int, outgoing: Runs, incoming: Runs, old: Mapping[str, Tensor], as_: DtypeOf
    ) -> None:
        self._places = {peer: torch.empty(1, dtype=torch.int64) for peer in incoming}
        self._works = self._messages.post(now, {}, self._places, PLACE)
        if not outgoing:
            return
        self._turn = 1 - self._turn
        self._messages.wait(self._busy[self._turn], now, outgoing)
        self._busy[self._turn].clear()
        at = self._turn * (len(self._mine) // 2)
        places: dict[int, Tensor] = {}
        for peer, runs in outgoing.items():
            bucket = self._mine[at : at + buckets.bucket_bytes(runs, as_)]
            buckets.pack(bucket, runs, old, as_)
            buckets.seal(bucket, now)
            places[peer] = torch.tensor([at])
            at += len(bucket)
        done = {peer: torch.empty(1, dtype=torch.int64) for peer in outgoing}
        self._busy[self._turn].extend(self._messages.post(now, {}, done, DONE))
        self._busy[self._turn].extend(self._messages.post(now, places, {}, PLACE))
        self._held[self._turn] = [*places.values(), *done.values()]

    def arrivals(self, now: int, incoming: Runs, as_: DtypeOf) -> Iterator[tuple[int, Tensor]]:
        self._messages.wait(self._works, now, incoming)
        for peer, place in self._places.items():
            at = int(place)
            yield peer, self._peers[peer][at : at + buckets.bucket_bytes(incoming[peer], as_)]
            works = self._messages.post(now, {peer: place}, {}, DONE)
            self._messages.wait(works, now, [peer])

    def finish(self) -> None:
        for works in self._busy:
            self._messages.wait(works, -1, self._peers)
            works.clear()


def meet(group: dist.ProcessGroup | None, room: int, timeout: timedelta) -> SharedMemory | None:
    """Show the ranks of the group one another's memory; None unless all are on one host.
    Collective.

    ``room`` is what this rank sends in one round at most, in bytes.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    descriptor = os.memfd_create("reshard")
    try:
        size = max(2 * (-(-room // mmap.PAGESIZE) * mmap.PAGESIZE), mmap.PAGESIZE)
        os.ftruncate(descriptor, size)
        mine = torch.tensor([_host(), os.getpid(), descriptor, size])
        found = _gathered(mine, ranks, group)
        peers = _mapped(found) if len({int(one[0]) for one in found}) == 1 else None
        seen = _gathered(torch.tensor([peers is not None]), ranks, group)
    finally:
        os.close(descriptor)
    if peers is None or not all(bool(one) for one in seen):
        return None
    own = peers.pop(rank)
    return SharedMemory(group, timeout, own, peers)


class _Messages:
    """Sends and receives of a group, with its errors as ours."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout

    def post(
        self, now: int, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int = 0
    ) -> list[dist.Work]:
        operations = [
            dist.P2POp(kind, tensor, group=self._group, tag=tag, group_peer=peer)
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


def _gathered(mine: Tensor, ranks: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    found = [torch.empty_like(mine) for _ in range(ranks)]
    try:
        dist.all_gather(found, mine, group=group)
    except RuntimeError as error:
        raise PeerLost(f"a rank was lost before anything was sent: {error}") from error
    return found


def _host() -> int:
    """A number that processes share which see each other's memory by process id."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return (int(boot.replace("-", ""), 16) ^ namespace) & ((1 << 62) - 1)


def _mapped(found: Sequence[Tensor]) -> dict[int, Tensor] | None:
    peers: dict[int, Tensor] = {}
    for rank, (_, process, descriptor, size) in enumerate(one.tolist() for one in found):
        try:
            opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            peers[rank] = torch.frombuffer(mmap.mmap(opened, size), dtype=torch.uint8)
        finally:
            os.close(opened)
    return peers


def _lost(now: int, peers: Iterable[int]) -> str:
    return (
        f"round {now}: rank {sorted(set(peers))} or the way to it was lost, or nothing came in "
        "time; the old buffers are as they were"
    )
