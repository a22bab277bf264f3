"""Carry a plan out between the ranks of several worker groups: trainers and engines, over channels.

::

    vote                every rank has the buffers that the plan asks for
    a rank that sends   round by round: pack, seal --put(key=receiver)--+
    a rank that takes   check, unpack <--get(key=own)-------------------+    in any order
    vote                every rank found every bucket sound

    waits for                   unblocked by
    room in the channel         whoever takes a bucket; takers wait for nothing but buckets
    a bucket                    its sender, which waits for room only
    a vote                      the lowest rank, which waits for one of every rank

The rounds, buckets, checksums and votes are those of `rlinf_async.backends.reshard`, whose ranks
share a torch.distributed group; here none is needed. Old buffers are only read. A rank that sends
has two buckets at a time, one that takes has one; what waits between them, the channel's capacity
bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from rlinf_async import patient
from rlinf_async.channels import ChannelError, Receiver, Sender
from rlinf_async.messages.reshard import ReshardVote, ShardBucket
from rlinf_async.parallel import Plan, RankPlan, Run, in_rounds

if TYPE_CHECKING:
    from rlinf_async.backends.reshard import Report, State

Compute: TypeAlias = Callable[..., Awaitable[Any]]
"""`Worker.compute`: runs a blocking function elsewhere"""
BUCKET_BYTES = 16 * 1024 * 1024


class ReshardPorts(NamedTuple):
    """The ends that an exchange goes over; all ranks of all groups have the same two channels."""

    buckets: Sender[ShardBucket]
    arrivals: Receiver[ShardBucket]
    votes: Sender[ReshardVote]
    verdicts: Receiver[ReshardVote]


async def reshard_over_channels(
    plan: Plan,
    rank: int,
    states: Sequence[State],
    ports: ReshardPorts,
    *,
    exchange: int,
    bucket_bytes: int = BUCKET_BYTES,
    timeout: float = 120.0,
    compute: Compute | None = None,
) -> Report:
    """Fill this rank's new buffers of every state from the old ones of all ranks.

    Every rank of the plan calls it, with its number there, the same ``states`` in the same order,
    and a higher ``exchange`` each time: what is left of one that failed is then known for old. CPU
    buffers only. ``timeout`` is in seconds, for the whole. Returns only if every rank has verified
    everything. Raises `BuffersDiffer` before anything is sent, `PeerLost`, `BucketDamaged`, and
    `NotAgreed` where all was well when it was not elsewhere (see
    `rlinf_async.backends.reshard.errors`).
    """
    one = _Exchange(plan, rank, states, ports, exchange, bucket_bytes, compute or _at_once)
    async with _in_time(timeout, one):
        return await one.run()


class _Part(NamedTuple):
    """One state of one rank."""

    mine: RankPlan
    state: State
    as_: Callable[[Run], Any]


class _Exchange:
    """One rank's side of one exchange."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        states: Sequence[State],
        ports: ReshardPorts,
        number: int,
        bucket_bytes: int,
        compute: Compute,
    ) -> None:
        self._plan, self._rank, self._states = plan, rank, states
        self._ports, self._number, self._compute = ports, number, compute
        self._bucket_bytes = bucket_bytes
        self._sent = self._received = self._rounds = self._peak = self._kept = 0
        self.waits_for = "the other ranks"
        """for whom this rank waits, to be said when it was in vain"""

    async def run(self) -> Report:
        """Vote, exchange, vote."""
        from rlinf_async.backends.reshard import BucketDamaged, BuffersDiffer, Report
        from rlinf_async.backends.reshard.executor import faults_of

        whole = self._plan.of_rank(self._rank)
        faults = [fault for one in self._states for fault in faults_of(self._plan, whole, one)]
        await self._vote(BuffersDiffer, faults)
        parts = await self._compute(self._parts)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send(parts, tasks))
                taking = tasks.create_task(self._take(parts))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group.exceptions[0].__cause__
        await self._vote(BucketDamaged, taking.result())
        return Report(self._sent, self._received, self._rounds, self._peak, self._kept)

    def _parts(self) -> list[_Part]:
        from rlinf_async.backends.reshard.executor import limit_of, travels_as

        limits = [limit_of(self._plan, state, self._bucket_bytes) for state in self._states]
        rounds = {
            limit: in_rounds(self._plan, limit).of_rank(self._rank)
            for limit in dict.fromkeys(limits)
        }
        return [
            _Part(rounds[limit], state, travels_as(self._plan, state))
            for limit, state in zip(limits, self._states, strict=True)
        ]

    async def _send(self, parts: Sequence[_Part], tasks: asyncio.TaskGroup) -> None:
        """Pack the next bucket while the one before waits for room."""
        from rlinf_async.backends.reshard.exchange import by_peer, by_round, copy_runs

        leaving: asyncio.Task[None] | None = None
        before = 0
        for number, part in enumerate(parts):
            rounds = by_round(part.mine.sends)
            self._rounds += len(rounds)
            for now, runs in sorted(rounds.items()):
                for peer, outgoing in by_peer(runs, "target_rank").items():
                    data = await self._compute(_packed, part, outgoing, now)
                    self._sent += data.nbytes
                    self._peak = max(self._peak, before + data.nbytes)
                    before = data.nbytes
                    if leaving is not None:
                        await leaving
                    bucket = ShardBucket(self._number, number, now, self._rank, data)
                    leaving = tasks.create_task(self._ports.buckets.put(bucket, key=peer))
            mine, state = part.mine, part.state
            self._kept += await self._compute(copy_runs, mine.copies, state.old, state.new)

    async def _take(self, parts: Sequence[_Part]) -> list[str]:
        """Take this rank's buckets; return what is wrong with them."""
        from rlinf_async.backends.reshard.exchange import by_peer, by_round, damage

        awaited = {
            (number, now, peer): incoming
            for number, part in enumerate(parts)
            for now, runs in by_round(part.mine.receives).items()
            for peer, incoming in by_peer(runs, "source_rank").items()
        }
        faults: list[str] = []
        while awaited:
            self.waits_for = f"rank {sorted({peer for _, _, peer in awaited})}"
            one = await self._ports.arrivals.get(key=self._rank)
            if one.exchange < self._number:
                continue
            found = awaited.pop((one.state, one.round, one.source), None)
            if found is None or one.exchange > self._number:
                faults.append(
                    f"a bucket of exchange {one.exchange}, state {one.state}, round {one.round} "
                    f"came from rank {one.source}, which nobody waits for"
                )
                continue
            self._received += one.data.nbytes
            self._peak = max(self._peak, one.data.nbytes)
            if not await self._compute(_unpacked, parts[one.state], found, one):
                faults.append(damage(one.source, one.round, found))
        return faults

    async def _vote(self, kind: type[Exception], faults: Sequence[str]) -> None:
        """Raise ``kind`` here and `NotAgreed` on the others, unless no rank has a fault."""
        from rlinf_async.backends.reshard import NotAgreed

        ranks = sorted({*self._plan.old.ranks, *self._plan.new.ranks})
        mine = ReshardVote(self._number, self._rank, tuple(faults[:4]))
        await self._ports.votes.put(mine, key=ranks[0])
        if self._rank == ranks[0]:
            await self._count(ranks)
        self.waits_for = f"rank {ranks[0]}, which counts the votes"
        verdict = await self._heard()
        if faults:
            raise kind("; ".join(mine.faults))
        if verdict.faults:
            raise NotAgreed(f"resharding failed elsewhere: {'; '.join(verdict.faults)}")

    async def _count(self, ranks: Sequence[int]) -> None:
        missing, faults = set(ranks), dict[int, tuple[str, ...]]()
        while missing:
            self.waits_for = f"rank {sorted(missing)}"
            vote = await self._heard()
            missing.discard(vote.rank)
            faults |= {vote.rank: vote.faults} if vote.faults else {}
        said = tuple(f"rank {rank}: {'; '.join(faults[rank])}" for rank in sorted(faults))
        for rank in ranks:
            await self._ports.votes.put(ReshardVote(self._number, ranks[0], said), key=rank)

    async def _heard(self) -> ReshardVote:
        while (vote := await self._ports.verdicts.get(key=self._rank)).exchange < self._number:
            continue
        return vote


def _packed(part: _Part, runs: Sequence[Run], now: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    import torch

    from rlinf_async.backends.reshard import buckets

    # New memory each time: in one process the receiver looks at this very array.
    bucket = torch.empty(buckets.bucket_bytes(runs, part.as_), dtype=torch.uint8)
    buckets.seal(bucket, buckets.pack(bucket, runs, part.state.old, part.as_), now)
    return bucket.numpy()


def _unpacked(part: _Part, runs: Sequence[Run], one: ShardBucket) -> bool:
    import torch

    from rlinf_async.backends.reshard import buckets

    if one.data.nbytes != buckets.bucket_bytes(runs, part.as_):
        return False
    fit = one.data.flags.writeable and one.data.ctypes.data % buckets.ALIGNMENT == 0
    bucket = torch.from_numpy(one.data if fit else one.data.copy())  # torch warns of read-only ones
    return buckets.unpack(bucket, runs, part.state.new, part.as_, one.round)


async def _at_once(fn: Callable[..., Any], *given: Any) -> Any:
    return fn(*given)


@asynccontextmanager
async def _in_time(seconds: float, exchange: _Exchange) -> AsyncIterator[None]:
    from rlinf_async.backends.reshard import PeerLost

    try:
        async with patient.timeout(seconds):
            yield
    except TimeoutError as error:
        raise PeerLost(
            f"nothing came from {exchange.waits_for} in {seconds:.0f} s; the old buffers are as "
            "they were"
        ) from error
    except ChannelError as error:
        raise PeerLost(
            f"a channel ended while this rank waited for {exchange.waits_for}: {error}; the old "
            "buffers are as they were"
        ) from error
