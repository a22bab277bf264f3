"""Collectives of the active ranks: start from the same weights, fail together, never hang alone.

At world size 1 all of them are local, or do nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_async.backends.checkpoint.together import Rank as Rank
from rlinf_async.backends.checkpoint.together import all_gather as all_gather
from rlinf_async.backends.checkpoint.together import fail_together as fail_together
from rlinf_async.backends.policies.moments import Moments, merge_moments


def broadcast_module(module: nn.Module, world_size: int) -> None:
    """Give all ranks the parameters and buffers of rank 0."""
    if world_size > 1:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)


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


def merged_moments(member: Rank, moments: Moments) -> Moments:
    """Return the moments of all ranks together, equal on each to the last bit."""
    columns = [all_gather(member, part) for part in moments]
    parts = [Moments(*row) for row in zip(*columns, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = merge_moments(total, part)
    return total


def require_equal(member: Rank, number: int, what: str) -> None:
    """Raise `ValueError` on all ranks unless ``number`` is the same on each."""
    found = [int(one) for one in all_gather(member, torch.tensor([number]))]
    if len(set(found)) > 1:
        raise ValueError(
            f"{what} differs between the ranks: {found}; every rank must train the same number"
        )
