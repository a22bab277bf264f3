"""How buckets are moved: as messages of the process group, or through shared memory of one host.

::

    Collective     pack -> isend ............ irecv -> check, unpack         any hosts, any device
    SharedMemory   pack into own memory, send the place -> check, unpack from the peer's memory
                   the peer sends when it is done, and the memory is reused       one host, CPU

    sender     wait until the slot is read .. pack into it .. PLACE -->
    receiver                                       <-- DONE .. check, unpack out of it

A rank's shared memory has two slots, so that it packs a round while peers still read the one
before. The memory has no name, and neither have the pipes, so a kill leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_async.backends.reshard import buckets
from rlinf_async.backends.reshard.buckets import DtypeOf
from rlinf_async.backends.reshard.signals import DONE, PLACE, Inboxes, PeerLost, Signals
from rlinf_async.parallel import BufferRun
from rlinf_async.weights.memory_files import this_host

Runs = Mapping[int, Sequence[BufferRun]]
"""runs by peer"""


class Collective:
    """A `Transport` that sends buckets as messages of the process group."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta
    ) -> None:
        self._group, self._device, self._timeout = group, device, timeout
        self._arriving: dict[int, Tensor] = {}
        self._leaving: list[Tensor] = []
        self._works: list[dist.Work] = []
        self.peak = 0
        """largest size of all buckets at one time, in bytes"""

    def begin(
        self, now: int, outgoing: Runs, incoming: Runs, old: Mapping[str, Tensor], as_: DtypeOf
    ) -> None:
        """Pack and send the buckets of a round. Raises `PeerLost`, as the others do."""
        self._arriving = {peer: self._allocate(runs, as_) for peer, runs in incoming.items()}
        leaving = {peer: self._allocate(runs, as_) for peer, runs in outgoing.items()}
        for peer, bucket in leaving.items():
            buckets.seal(bucket, buckets.pack(bucket, outgoing[peer], old, as_), now)
        self._leaving = list(leaving.values())
        self.peak = max(self.peak, sum(map(len, [*self._leaving, *self._arriving.values()])))
        self._works = self._post(now, leaving, self._arriving)

    def arrivals(self, now: int, incoming: Runs, as_: DtypeOf) -> Iterator[tuple[int, Tensor]]:
        """Yield each peer's bucket, which is valid until the next one is asked for."""
        try:
            for work in self._works:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise PeerLost(_lost(now, incoming)) from error
        self._leaving = []
        yield from self._arriving.items()
        self._arriving = {}

    def finish(self) -> None:
        """Wait until no peer reads this rank's buckets any more."""

    def close(self) -> None:
        """Free everything; peers that still wait for this rank get `PeerLost`."""

    def _allocate(self, runs: Sequence[BufferRun], as_: DtypeOf) -> Tensor:
        size = buckets.bucket_bytes(runs, as_)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _post(
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


def _lost(now: int, peers: Iterable[int]) -> str:
    return (
        f"round {now}: rank {sorted(set(peers))} or the way to it was lost, or nothing came in "
        "time; the old buffers are as they were"
    )


SLOTS = 2
"""slots of a rank's memory: it packs one while peers still read the other"""
FIRST = "before anything was sent"


class SharedMemory:
    """A `Transport` through shared memory. Made by `connect`."""

    def __init__(self, signals: Signals, mine: Tensor, peers: Mapping[int, Tensor]) -> None:
        self._signals = signals
        self._mine, self._peers = mine, peers
        self._turn = 0
        self._reading: list[list[int]] = [[] for _ in range(SLOTS)]
        """peers that have not read their bucket yet, by slot"""
        self.peak = len(mine)

    def begin(
        self, now: int, outgoing: Runs, incoming: Runs, old: Mapping[str, Tensor], as_: DtypeOf
    ) -> None:
        if not outgoing:
            return
        self._turn = (self._turn + 1) % SLOTS
        self._wait_until_read(self._turn)
        at = self._turn * (len(self._mine) // SLOTS)
        for peer, runs in outgoing.items():
            bucket = self._mine[at : at + buckets.bucket_bytes(runs, as_)]
            buckets.seal(bucket, buckets.pack(bucket, runs, old, as_), now)
            self._signals.send(peer, PLACE, at)
            self._reading[self._turn].append(peer)
            at += len(bucket)

    def arrivals(self, now: int, incoming: Runs, as_: DtypeOf) -> Iterator[tuple[int, Tensor]]:
        for peer, runs in incoming.items():
            at = self._signals.wait(peer, PLACE)
            yield peer, self._peers[peer][at : at + buckets.bucket_bytes(runs, as_)]
            self._signals.send(peer, DONE, now)

    def finish(self) -> None:
        for slot in range(SLOTS):
            self._wait_until_read(slot)

    def close(self) -> None:
        self._signals.close()

    def _wait_until_read(self, slot: int) -> None:
        for peer in self._reading[slot]:
            self._signals.wait(peer, DONE)
        self._reading[slot].clear()


Transport: TypeAlias = Collective | SharedMemory
"""how an exchange moves its buckets: two steps of each round, and an end"""


class _Address(NamedTuple):
    """Place at which the other ranks find the memory and the pipes of a rank."""

    host: int
    process: int
    memory: int
    """file descriptor of the memory"""
    size: int
    """size in bytes"""
    inboxes: tuple[int, ...]


def connect(
    group: dist.ProcessGroup | None, room: int, sources: Collection[int], timeout: timedelta
) -> SharedMemory | None:
    """Map the memory of the other ranks of the group; None unless all are on one host. Collective.

    ``room`` is what this rank sends in one round at most, in bytes; ``sources`` are the ranks that
    it receives from. Raises `PeerLost` when a rank is gone or silent for ``timeout``; nothing is
    left open then.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    memory = os.memfd_create("reshard")
    inboxes = Inboxes(rank, ranks)
    made: SharedMemory | None = None
    peers: dict[int, Tensor] | None = None
    writers: dict[int, int] | None = None
    try:
        size = max(SLOTS * (-(-room // mmap.PAGESIZE) * mmap.PAGESIZE), mmap.PAGESIZE)
        os.ftruncate(memory, size)
        mine = torch.tensor([this_host(), os.getpid(), memory, size, *inboxes.numbers()])
        found = (one.tolist() for one in gathered(mine, group, timeout, FIRST))
        addresses = [_Address(one[0], one[1], one[2], one[3], tuple(one[4:])) for one in found]
        if len({address.host for address in addresses}) == 1:
            peers, writers = _mapped(addresses, {rank, *sources}), _opened(inboxes, addresses, rank)
        sees_all = torch.tensor([peers is not None and writers is not None])
        all_see = all(bool(one) for one in gathered(sees_all, group, timeout, FIRST))
        if all_see and peers is not None and writers is not None:
            own = peers.pop(rank)
            made = SharedMemory(Signals(inboxes.readers(), writers, timeout), own, peers)
        return made
    finally:
        os.close(memory)
        if made is None:
            inboxes.close()
            for one in (writers or {}).values():
                os.close(one)


def gathered(
    mine: Tensor, group: dist.ProcessGroup | None, timeout: timedelta, when: str
) -> list[Tensor]:
    """Return the tensor of every rank. Raises `PeerLost`, which says when that was."""
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        work = dist.all_gather(found, mine, group=group, async_op=True)
        if work is not None:
            work.wait(timeout)
    except RuntimeError as error:
        raise PeerLost(f"a rank was lost {when}: {error}") from error
    return found


def _opened(inboxes: Inboxes, addresses: Sequence[_Address], rank: int) -> dict[int, int] | None:
    found = {
        peer: (address.process, address.inboxes)
        for peer, address in enumerate(addresses)
        if peer != rank
    }
    try:
        return inboxes.open(found)
    except OSError:
        return None


def _mapped(addresses: Sequence[_Address], wanted: Collection[int]) -> dict[int, Tensor] | None:
    peers: dict[int, Tensor] = {}
    for rank in wanted:
        address = addresses[rank]
        try:
            opened = os.open(
                f"/proc/{address.process}/fd/{address.memory}", os.O_RDWR | os.O_CLOEXEC
            )
        except OSError:
            return None
        try:
            # All pages at once: a fault for each would cost more than the copy into it.
            mapped = mmap.mmap(opened, address.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            peers[rank] = torch.frombuffer(mapped, dtype=torch.uint8)
        finally:
            os.close(opened)
    return peers
