"""`Proposal`: what each rank says before the number of ranks changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from rlinf_async.backends.fsdp.errors import FSDPError, OffloadedError, RescaleError
from rlinf_async.backends.fsdp.progress import Progress, progress_of

if TYPE_CHECKING:
    from rlinf_async.backends.fsdp.manager import ShardedModelManager


class Proposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank was asked for, and brings along."""

    world_size: int
    bucket_bytes: int
    groups: list[int]
    """the sizes for which it has a process group"""
    progress: Progress | None
    """None from an idle rank"""
    extra: bytes


def proposal_of(
    manager: ShardedModelManager, world_size: int, bucket_bytes: int, extra: bytes
) -> Proposal:
    """Return this rank's; raises `FSDPError` where it cannot change."""
    if manager.cfg.strategy != "fsdp2":
        raise FSDPError(
            f"strategy {manager.cfg.strategy!r} cannot change its number of ranks while it "
            "trains: use strategy 'fsdp2', or a checkpoint, which any number can load"
        )
    if manager.param_offloaded or manager.optimizer_offloaded:
        raise OffloadedError(
            "rescale() while model or optimizer is offloaded: call load_param_and_grad() and "
            "load_optimizer() first"
        )
    progress = progress_of(manager) if manager.active else None
    return Proposal(world_size, bucket_bytes, manager.groups.sizes, progress, extra)


def check_same(proposals: Sequence[Proposal]) -> None:
    """Raise `RescaleError` unless all ranks were asked for the same."""
    for field in ("world_size", "bucket_bytes"):
        asked = [getattr(one, field) for one in proposals]
        if len(set(asked)) > 1:
            raise RescaleError(f"the ranks were asked for different {field}: {asked}")
