"""Collectives of the ranks that train; and `fail_together`: what fails on one is an error on each.

A rank that left alone would keep the others in the next collective until that times out. At world
size 1 nothing is exchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_async.backends.checkpoint.folders import CheckpointError


class Rank(Protocol):
    """One of the active ranks."""

    @property
    def rank(self) -> int:
        """Its number."""
        ...

    @property
    def world_size(self) -> int:
        """Number of active ranks."""
        ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The active ranks, in the order of their shards; None is torch's default group."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tensors of collectives are."""
        ...


def all_gather(member: Rank, tensor: Tensor) -> list[Tensor]:
    """Return the tensor of every rank, in rank order; shapes and dtypes must be the same."""
    if member.world_size == 1:
        return [tensor]
    local = tensor.to(member.device).contiguous()
    gathered = [torch.empty_like(local) for _ in range(member.world_size)]
    places = [gathered[rank] for rank in dist.get_process_group_ranks(member.group)]
    dist.all_gather(places, local, group=member.group)
    return [one.to(tensor.device) for one in gathered]


def all_reduce(
    member: Rank, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Replace the tensor, on the member's device, by its sum (or so) over all ranks."""
    if member.world_size > 1:
        dist.all_reduce(tensor, operation, group=member.group)


def broadcast_bytes(member: Rank, content: bytes) -> bytes:
    """Return the content of rank 0; that of the others is ignored."""
    if member.world_size == 1:
        return content
    size = torch.tensor([len(content)], device=member.device)
    dist.broadcast(size, src=0, group=member.group)
    sent = torch.empty(int(size), dtype=torch.uint8, device=member.device)
    if member.rank == 0:
        sent.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(sent, src=0, group=member.group)
    return sent.cpu().numpy().tobytes()


def wait_for_all(member: Rank) -> None:
    """Return when every rank has called this."""
    if member.world_size > 1:
        dist.barrier(member.group)


@contextlib.contextmanager
def fail_together(member: Rank, doing: str) -> Iterator[None]:
    """Leave normally only if every rank did.

    A rank that failed raises its own error, the others `CheckpointError` naming it, so that no rank
    waits in the next collective for one that has left. If a rank has died, the error names that.
    """
    failed = torch.ones(1, dtype=torch.int64)
    try:
        yield
        failed.zero_()
    finally:
        # Runs on the failing rank too: its own error then goes on from here.
        try:
            flags = all_gather(member, failed)
        except RuntimeError as lost:
            raise CheckpointError(f"{doing}: another rank was lost ({lost})") from lost
    culprits = [rank for rank, flag in enumerate(flags) if flag.item()]
    if culprits:
        raise CheckpointError(f"{doing} failed on rank {culprits}; see that rank's error")
