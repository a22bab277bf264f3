"""One rank's side of an exchange: its rounds, and the votes before and after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_async.backends.reshard import buckets
from rlinf_async.backends.reshard.buckets import DtypeOf, window
from rlinf_async.backends.reshard.errors import NotAgreed, PeerLost, ReshardError
from rlinf_async.backends.reshard.transports import Transport
from rlinf_async.parallel import RankPlan, Run


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


def by_peer(runs: Iterable[Run], field: str) -> dict[int, list[Run]]:
    """Return the runs by their source or target rank."""
    found: dict[int, list[Run]] = {}
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
    votes = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        work = dist.all_gather(votes, mine, group=group, async_op=True)
        if work is not None:
            work.wait(timeout)
    except RuntimeError as lost:
        raise PeerLost(f"a rank was lost before the vote: {lost}") from (error or lost)
    if error is not None:
        raise error
    failed = [rank for rank, one in enumerate(votes) if one.item()]
    if failed:
        raise NotAgreed(f"resharding failed on rank {failed}; see that rank's error")


def copy_runs(runs: Iterable[Run], old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> int:
    """Copy the runs that stay on a rank; return the bytes of those that also stay in place."""
    kept = 0
    for run in runs:
        source = window(old[run.source.buffer], run.source)
        target = window(new[run.target.buffer], run.target)
        if buckets.is_same(target, source):
            kept += target.nbytes
        else:
            buckets.copy(target, source)
    return kept


def by_round(runs: Iterable[Run]) -> dict[int, list[Run]]:
    """Return the runs by their round."""
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(run.round, []).append(run)
    return found


def damage(peer: int, now: int, runs: Sequence[Run]) -> str:
    """Return a description of a damaged bucket."""
    names = list(dict.fromkeys(name for run in runs for name in run.tensors))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"the bucket of round {now} from rank {peer} ({', '.join(names[:4])}{more}) is damaged"
