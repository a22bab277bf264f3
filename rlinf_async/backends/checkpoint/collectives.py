"""Ranks that train together: their collectives, errors, and a checkpoint that all of them write and
read.

What fails on one rank is an error on each (`fail_together`): a rank that left alone would keep the
others in the next collective until that times out. At world size 1 nothing is exchanged.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_async.backends.checkpoint.folders import (
    CheckpointError,
    being_read,
    find_checkpoint,
    fresh_staging,
    staging_folder,
)
from rlinf_async.backends.checkpoint.reading import Saved, read_checkpoint
from rlinf_async.backends.checkpoint.writing import CheckpointWriter


class Rank(Protocol):
    """One of the active ranks."""

    @property
    def rank(self) -> int:
        """Number of the rank."""
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
        """Device of the tensors of collectives."""
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


class Counters(msgspec.Struct, frozen=True):
    """Progress of a training, in optimizer steps. Part of checkpoints; equal on all ranks."""

    steps: int
    skipped_steps: int
    scaler_factor: float = 1.0
    scaler_good_steps: int = 0


class Own(NamedTuple):
    """Values that each rank saves besides its tensors."""

    counters: Counters
    rng: Tensor
    """state of torch's random numbers on the CPU"""
    extra: dict[str, Any]


def encode_own(counters: Counters, extra: Mapping[str, Any]) -> bytes:
    """Encode what this rank saves besides its tensors: now, as some of it goes on changing."""
    buffer = io.BytesIO()
    progress = msgspec.structs.asdict(counters)
    torch.save({"progress": progress, "rng": torch.get_rng_state(), "extra": dict(extra)}, buffer)
    return buffer.getvalue()


def prepare_writing(member: Rank, writer: CheckpointWriter, path: Path) -> None:
    """Make an empty staging folder, once the checkpoint before is written. Collective."""
    with fail_together(member, "writing the checkpoint before"):
        writer.wait()
    with fail_together(member, f"preparing {staging_folder(path)}"):
        if member.rank == 0:
            fresh_staging(path)


@contextlib.contextmanager
def reading_together(
    member: Rank, writer: CheckpointWriter, path: Path, check: Callable[[Saved], None]
) -> Iterator[tuple[Saved, list[Own]]]:
    """Map a checkpoint folder into memory, and keep it from being removed inside the block.

    Returns it with what every rank saved besides its tensors. ``check`` raises for what does not
    fit the model. Where one rank raises `CheckpointError`, all do.
    """
    writer.settle()
    with fail_together(member, "writing the checkpoint before"):
        writer.wait()
    with contextlib.ExitStack() as reading:
        with fail_together(member, f"reading {path}"):
            folder = find_checkpoint(path)
            reading.enter_context(being_read(folder))
        with fail_together(member, f"reading {folder}"):
            size = member.world_size
            saved = read_checkpoint(folder, lambda number: number % size == member.rank)
            check(saved)
            own = [_decode_own(one, folder) for one in saved.own]
            if not own:
                raise CheckpointError(
                    f"{folder} has no file with a rank's own state (counters, random numbers): "
                    f"{_FOREIGN}"
                )
        yield saved, own


_FOREIGN = "it was not written by save_checkpoint()"


def _decode_own(content: dict[str, Any], folder: Path) -> Own:
    """Return a rank's own state, as `encode_own` wrote it."""
    try:
        counters = msgspec.convert(content["progress"], Counters)
        return Own(counters, content["rng"], content["extra"])
    except (KeyError, msgspec.ValidationError) as error:
        raise CheckpointError(
            f"{folder} lacks a part of a rank's own state ({error}): {_FOREIGN}"
        ) from error


def broadcast_module(module: nn.Module, world_size: int) -> None:
    """Give all ranks the parameters and buffers of rank 0."""
    if world_size > 1:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)


def require_equal(member: Rank, number: int, what: str) -> None:
    """Raise `ValueError` on all ranks unless ``number`` is the same on each."""
    found = [int(one) for one in all_gather(member, torch.tensor([number]))]
    if len(set(found)) > 1:
        raise ValueError(
            f"{what} differs between the ranks: {found}; every rank must train the same number"
        )
