"""One rank's side of an exchange: its rounds, and the votes around them."""

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
from rlinf_async.parallel import RankPlan, Run


class Exchange:
    """The rounds of one rank, and what they came to.

    A damaged bucket is noted and the exchange goes on: peers must not wait for a rank that left.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta
    ) -> None:
        self._group, self._device, self._timeout = group, device, timeout
        self.damaged: list[str] = []
        self.sent = self.received = self.rounds = self.peak = 0

    def run(
        self,
        mine: RankPlan,
        old: Mapping[str, Tensor],
        new: Mapping[str, Tensor],
        dtype_of: DtypeOf,
    ) -> None:
        """Go through the rounds of one state. Raises `PeerLost`."""
        sends, receives = _by_round(mine.sends), _by_round(mine.receives)
        rounds = sorted(sends.keys() | receives.keys())
        copies = iter(mine.copies)
        share = -(-len(mine.copies) // max(1, len(rounds)))
        for now in rounds:
            outgoing = _by_peer(sends.get(now, ()), "target_rank")
            incoming = _by_peer(receives.get(now, ()), "source_rank")
            arriving, works, leaving = self._start(now, outgoing, incoming, old, dtype_of)
            _copy(islice(copies, share), old, new)
            self._wait(works, now, outgoing.keys() | incoming.keys())
            del leaving
            for peer, bucket in arriving.items():
                if not buckets.is_sound(bucket, now):
                    self.damaged.append(_damage(peer, now, incoming[peer]))
                buckets.unpack(bucket, incoming[peer], new, dtype_of)
        _copy(copies, old, new)
        self.rounds += len(rounds)

    def _start(
        self,
        now: int,
        outgoing: Mapping[int, Sequence[Run]],
        incoming: Mapping[int, Sequence[Run]],
        old: Mapping[str, Tensor],
        dtype_of: DtypeOf,
    ) -> tuple[dict[int, Tensor], list[dist.Work], list[Tensor]]:
        """Post the receives and the sends of a round."""
        arriving = {
            peer: torch.empty(
                buckets.bucket_bytes(runs, dtype_of), dtype=torch.uint8, device=self._device
            )
            for peer, runs in incoming.items()
        }
        leaving = {
            peer: buckets.pack(runs, old, dtype_of, self._device) for peer, runs in outgoing.items()
        }
        for bucket in leaving.values():
            buckets.seal(bucket, now)
        self._count(leaving.values(), arriving.values())
        operations = [
            *(self._operation(dist.irecv, bucket, peer) for peer, bucket in arriving.items()),
            *(self._operation(dist.isend, bucket, peer) for peer, bucket in leaving.items()),
        ]
        try:
            return arriving, dist.batch_isend_irecv(operations), list(leaving.values())
        except RuntimeError as error:
            raise PeerLost(_lost(now, [*outgoing, *incoming])) from error

    def _operation(self, kind: object, bucket: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, bucket, group=self._group, group_peer=peer)  # type: ignore[arg-type]

    def _wait(self, works: Iterable[dist.Work], now: int, peers: Iterable[int]) -> None:
        try:
            for work in works:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise PeerLost(_lost(now, peers)) from error

    def _count(self, leaving: Iterable[Tensor], arriving: Iterable[Tensor]) -> None:
        sent, received = sum(map(len, leaving)), sum(map(len, arriving))
        self.sent += sent
        self.received += received
        self.peak = max(self.peak, sent + received)


def vote(
    error: ReshardError | None,
    group: dist.ProcessGroup | None,
    device: torch.device,
    timeout: timedelta,
) -> None:
    """Raise ``error`` here, and `NotAgreed` on the other ranks, unless no rank has one.
    Collective."""
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


def _copy(runs: Iterable[Run], old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    for run in runs:
        source = window(old[run.source.buffer], run.source)
        window(new[run.target.buffer], run.target).copy_(source)


def _by_round(runs: Iterable[Run]) -> dict[int, list[Run]]:
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(run.round, []).append(run)
    return found


def _by_peer(runs: Iterable[Run], field: str) -> dict[int, list[Run]]:
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(getattr(run, field), []).append(run)
    return found


def _damage(peer: int, now: int, runs: Sequence[Run]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.tensors))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"the bucket of round {now} from rank {peer} ({', '.join(names[:4])}{more}) is damaged"


def _lost(now: int, peers: Iterable[int]) -> str:
    return (
        f"round {now}: rank {sorted(set(peers))} or the way to it was lost, or nothing came in "
        "time; the old buffers are as they were"
    )
