"""Executing a plan between the ranks of a process group: gloo on CPUs, NCCL on GPUs.

::

    vote:             every rank of the group has the buffers that the plan asks for
    for each round:   receive from each peer -----+
                      pack, seal, send to each ---+--> local copies meanwhile --> check, unpack
    vote:             every rank found every bucket sound

    waits for                              unblocked by
    a peer's bucket of the same round      the peer's pack, which waits for earlier rounds only
    the vote                               every rank of the group, idle ones too

Old buffers are only read, so a failure at any point leaves them as they were. Beside old and new
shards a rank has at most ``bucket_bytes`` of buckets, and at most 16 bytes of padding for each run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_async.backends.reshard import buckets
from rlinf_async.backends.reshard.buckets import DtypeOf, window
from rlinf_async.backends.reshard.reserved import Reservations, untouched_zeros
from rlinf_async.backends.reshard.shared_memory import Collective, Transport, connect, gathered
from rlinf_async.backends.reshard.signals import (
    BucketDamaged,
    BuffersDiffer,
    NotAgreed,
    PeerLost,
    ReshardError,
)
from rlinf_async.parallel import Buffer, BufferRun, Layout, Plan, RankPlan, in_rounds


class Exchange:
    """The rounds of one rank, and their figures.

    A damaged bucket is noted and the exchange goes on: peers must not wait for a rank that left.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.damaged: list[str] = []
        self.sent = self.received = self.rounds = self.kept = 0

    def run(
        self,
        mine: RankPlan,
        old: Mapping[str, Tensor],
        new: Mapping[str, Tensor],
        dtype_of: DtypeOf,
    ) -> None:
        """Go through the rounds of one state. Raises `PeerLost`."""
        sends, receives = by_round(mine.sends), by_round(mine.receives)
        rounds = sorted(sends.keys() | receives.keys())
        copies = iter(mine.copies)
        share = -(-len(mine.copies) // max(1, len(rounds)))
        for now in rounds:
            outgoing = by_peer(sends.get(now, ()), "target_rank")
            incoming = by_peer(receives.get(now, ()), "source_rank")
            self._transport.begin(now, outgoing, incoming, old, dtype_of)
            self.sent += sum(buckets.bucket_bytes(runs, dtype_of) for runs in outgoing.values())
            self.kept += copy_runs(islice(copies, share), old, new)
            for peer, bucket in self._transport.arrivals(now, incoming, dtype_of):
                if not buckets.unpack(bucket, incoming[peer], new, dtype_of, now):
                    self.damaged.append(damage(peer, now, incoming[peer]))
                self.received += len(bucket)
        self.kept += copy_runs(copies, old, new)
        self._transport.finish()
        self.rounds += len(rounds)


def most_sent(mine: RankPlan, dtype_of: DtypeOf) -> int:
    """Return the bytes of all buckets that a rank sends in its fullest round."""
    return max(
        (
            sum(
                buckets.bucket_bytes(to_one, dtype_of)
                for to_one in by_peer(runs, "target_rank").values()
            )
            for runs in by_round(mine.sends).values()
        ),
        default=0,
    )


def by_peer(runs: Iterable[BufferRun], field: str) -> dict[int, list[BufferRun]]:
    """Return the runs by their source or target rank."""
    found: dict[int, list[BufferRun]] = {}
    for run in runs:
        found.setdefault(getattr(run, field), []).append(run)
    return found


def vote(
    error: ReshardError | None,
    group: dist.ProcessGroup | None,
    device: torch.device,
    timeout: timedelta,
) -> None:
    """Raise ``error`` here and `NotAgreed` on the others, unless no rank has one. Collective."""
    mine = torch.tensor([error is not None], dtype=torch.int64, device=device)
    try:
        votes = gathered(mine, group, timeout, "before the vote")
    except PeerLost as lost:
        raise lost from (error or lost.__cause__)
    if error is not None:
        raise error
    failed = [rank for rank, one in enumerate(votes) if one.item()]
    if failed:
        raise NotAgreed(f"resharding failed on rank {failed}; see that rank's error")


def copy_runs(
    runs: Iterable[BufferRun], old: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> int:
    """Copy the runs that stay on a rank; return the bytes of the runs that also stay in place."""
    kept = 0
    for run in runs:
        source = window(old[run.source.buffer], run.source)
        target = window(new[run.target.buffer], run.target)
        if buckets.is_same(target, source):
            kept += target.nbytes
        else:
            buckets.copy(target, source)
    return kept


def by_round(runs: Iterable[BufferRun]) -> dict[int, list[BufferRun]]:
    """Return the runs by their round."""
    found: dict[int, list[BufferRun]] = {}
    for run in runs:
        found.setdefault(run.round, []).append(run)
    return found


def damage(peer: int, now: int, runs: Sequence[BufferRun]) -> str:
    """Return a description of a damaged bucket."""
    names = list(dict.fromkeys(name for run in runs for name in run.tensors))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"the bucket of round {now} from rank {peer} ({', '.join(names[:4])}{more}) is damaged"


DEFAULT_BUCKET_BYTES = 16 * 1024 * 1024
"""small enough that a bucket is still in a cache when it is read"""
DEFAULT_TIMEOUT = timedelta(seconds=120)


class BufferState(NamedTuple):
    """Buffers of one kind (weights, first moments, ...) on this rank, by the layouts' names.

    A rank that is in only one of the layouts gives an empty mapping for the other.
    """

    old: Mapping[str, Tensor]
    new: Mapping[str, Tensor]
    dtype: torch.dtype | None = None
    """dtype in the buckets, the same on all ranks; that of the new layout's tensors by default"""


class ExchangeReport(NamedTuple):
    """Figures of one exchange on this rank."""

    sent_bytes: int
    received_bytes: int
    rounds: int
    peak_bytes: int
    """largest size of all buckets at one time"""
    kept_bytes: int
    """bytes of the new buffers that were in their place already"""


def allocate(
    layout: Layout,
    rank: int,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    reserved: Reservations | None = None,
    kind: str = "",
    held: Mapping[str, Tensor] | None = None,
    without: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the buffers of a rank, to be filled; padding is zero.

    ``dtype`` replaces that of the layout (float32 moments of bfloat16 weights). Buffers on the CPU
    that are a range of one tensor lie in its place among ``reserved``, as ``kind``; what they share
    with those of ``held``, this rank's present ones, keeps its content. The others are
    new, and zero. Those named in ``without`` are left out.
    """
    found: dict[str, Tensor] = {}
    shapes = {one.name: one.shape for one in layout.tensors}
    for one in layout.of_rank(rank):
        if one.name in without:
            continue
        as_ = dtype or getattr(torch, one.dtype)
        first = _first(one, shapes)
        if reserved is None or device.type != "cpu" or first is None:
            found[one.name] = untouched_zeros(one.shape, as_, device)
        else:
            [piece] = one.pieces
            whole, now = shapes[piece.tensor], (held or {}).get(one.name)
            found[one.name] = reserved.room(kind, one.name, whole, first, one.shape, as_, now)
    return found


def reshard(
    *moves: tuple[Plan, Sequence[BufferState]],
    group: dist.ProcessGroup | None = None,
    device: torch.device,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    shared_memory: bool = True,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> ExchangeReport:
    """Fill the new buffers of every state from the old ones. Collective over the group.

    ``moves``: a plan with the states that go by it; for several, ranks meet and vote once. On one
    host, CPU tensors go through memory that the ranks share, unless ``shared_memory`` is False on
    all of them. The plan's ranks are those of the group; ranks in neither layout only vote.
    Returns only if every rank has verified everything. Raises `BuffersDiffer` before anything is
    sent, `PeerLost`, `BucketDamaged`, and `NotAgreed` on the ranks where all was well when it was
    not elsewhere."""
    rank = dist.get_rank(group)
    faults = [
        fault
        for plan, states in moves
        for state in states
        for fault in _faults_of(plan, plan.of_rank(rank), state)
    ]
    # A rank that cannot begin votes before others wait for its buckets.
    vote(BuffersDiffer("; ".join(faults[:4])) if faults else None, group, device, timeout)
    parts = [part for plan, states in moves for part in _parts(plan, states, rank, bucket_bytes)]
    transport: Transport | None = None
    if shared_memory and device.type == "cpu":
        room = max((most_sent(mine, as_) for mine, _, as_ in parts), default=0)
        sources = {run.source_rank for mine, _, _ in parts for run in mine.receives}
        transport = connect(group, room, sources, timeout)
    transport = transport or Collective(group, device, timeout)
    exchange = Exchange(transport)
    try:
        for mine, state, as_ in parts:
            exchange.run(mine, state.old, state.new, as_)
        damage = BucketDamaged("; ".join(exchange.damaged[:4])) if exchange.damaged else None
        vote(damage, group, device, timeout)
    finally:
        transport.close()
    return ExchangeReport(
        exchange.sent, exchange.received, exchange.rounds, transport.peak, exchange.kept
    )


def _parts(
    plan: Plan, states: Sequence[BufferState], rank: int, bucket_bytes: int
) -> Iterator[tuple[RankPlan, BufferState, DtypeOf]]:
    """Yield each state with this rank's rounds of it."""
    rounds: dict[int, RankPlan] = {}
    for state in states:
        limit = _limit_of(plan, state, bucket_bytes)
        if limit not in rounds:
            rounds[limit] = in_rounds(plan, limit).of_rank(rank)
        yield rounds[limit], state, _travel_dtype(plan, state)


def _travel_dtype(plan: Plan, state: BufferState) -> DtypeOf:
    """Return the dtype in the buckets of each run of a state."""
    dtypes = {one.name: getattr(torch, one.dtype) for one in plan.new.tensors}

    def dtype_of(run: BufferRun) -> torch.dtype:
        found: torch.dtype = state.dtype or dtypes[run.tensors[0]]
        return found

    return dtype_of


def _limit_of(plan: Plan, state: BufferState, bucket_bytes: int) -> int:
    """Return the bytes of a round, as the plan counts them: half of the limit in each direction."""
    half = max(1, bucket_bytes // 2)
    if state.dtype is None:
        return half
    narrowest = min(one.item_bytes for one in plan.new.tensors)
    return max(1, half * min(narrowest, state.dtype.itemsize) // state.dtype.itemsize)


def _faults_of(plan: Plan, mine: RankPlan, state: BufferState) -> Iterable[str]:
    """Yield what is missing or wrong in this rank's buffers of what the plan reads and writes."""
    read = {run.source.buffer for run in (*mine.copies, *mine.sends)}
    written = {run.target.buffer for run in (*mine.copies, *mine.receives)}
    for side, layout, used, held in (
        ("old", plan.old, read, state.old),
        ("new", plan.new, written, state.new),
    ):
        for one in layout.of_rank(mine.rank):
            if one.name not in used:
                continue
            if one.name not in held:
                yield f"rank {mine.rank} has no {side} buffer {one.name!r} {list(one.shape)}"
            elif (count := held[one.name].numel()) != torch.Size(one.shape).numel():
                yield (
                    f"rank {mine.rank}: {side} buffer {one.name!r} has {count} elements, the "
                    f"layout says {list(one.shape)}"
                )
            elif not held[one.name].is_contiguous():
                yield f"rank {mine.rank}: {side} buffer {one.name!r} is not contiguous"


def _first(one: Buffer, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Return the first element of the tensor of which a buffer is a range; None if it is not."""
    if len(one.pieces) != 1:
        return None
    [piece] = one.pieces
    whole = shapes[piece.tensor]
    if one.shape != piece.size or piece.size[1:] != whole[1:]:
        return None
    return piece.start[0] * math.prod(whole[1:]) if whole else 0
