"""Collectives of the active ranks: start from the same weights, fail together, never hang alone.

At world size 1 all of them are local, or do nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from rlinf_async.backends.checkpoint.collectives import (
    Rank,
    all_gather,
    all_reduce,
    broadcast_bytes,
    fail_together,
    wait_for_all,
)
from rlinf_async.backends.policies.moments import Moments, merge_moments

__all__ = [
    "Rank",
    "all_gather",
    "all_reduce",
    "broadcast_bytes",
    "broadcast_module",
    "fail_together",
    "merged_moments",
    "require_equal",
    "wait_for_all",
]


def broadcast_module(module: nn.Module, world_size: int) -> None:
    """Give all ranks the parameters and buffers of rank 0."""
    if world_size > 1:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)


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
