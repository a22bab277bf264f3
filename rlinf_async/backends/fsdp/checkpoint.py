"""Saving and loading one rank's model: what a checkpoint holds besides the tensors.

Moments and weights are read and written where they are, so nothing has to be onloaded for it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from rlinf_async.backends.checkpoint.folders import (
    being_read,
    find_checkpoint,
    fresh_staging,
    staging_folder,
)
from rlinf_async.backends.checkpoint.reading import read_checkpoint
from rlinf_async.backends.checkpoint.writer import CheckpointWriter, Content, ModelFiles
from rlinf_async.backends.fsdp import ranks
from rlinf_async.backends.fsdp.errors import CheckpointError
from rlinf_async.backends.fsdp.optim import Counters
from rlinf_async.backends.fsdp.state import (
    MODEL,
    OPTIMIZER,
    AddMoments,
    check_state,
    load_state,
    model_state,
    optimizer_state,
    part_of_rank,
    tied_names,
)

_FOREIGN = "it was not written by save_checkpoint()"


class Own(NamedTuple):
    """What each rank saves besides its tensors."""

    counters: Counters
    rng: Tensor
    """state of torch's random numbers on the CPU"""
    extra: dict[str, Any]


class Source(NamedTuple):
    """What one rank saves."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    counters: Counters
    extra: Mapping[str, Any]
    files: ModelFiles
    """kept beside the tensors, to export the model from; rank 0's"""


def begin(member: ranks.Rank, writer: CheckpointWriter, path: Path, source: Source) -> Future[Path]:
    """Start writing a checkpoint folder; see `FSDPModelManager.begin_checkpoint`."""
    staging = staging_folder(path)
    with ranks.fail_together(member, "writing the checkpoint before"):
        writer.wait()
    with ranks.fail_together(member, f"preparing {staging}"):
        if member.rank == 0:
            fresh_staging(path)
    # FSDP1 gathers its state in collectives: they stay outside of what may fail on one rank.
    state = _state(source)
    with ranks.fail_together(member, f"copying what goes to {path}"):
        content = _content(source, state, member.rank)
        return writer.begin(path, content, member.rank, member.world_size, source.optimizer)


def save(member: ranks.Rank, writer: CheckpointWriter, path: Path, source: Source) -> None:
    """Write a checkpoint folder; see `FSDPModelManager.save_checkpoint`."""
    begin(member, writer, path, source)
    with ranks.fail_together(member, f"writing {path}"):
        writer.wait()
    # The last of the ranks has renamed the folder, if they all see the same disk.
    with ranks.fail_together(member, f"finishing {path}"):
        if member.rank == 0 and staging_folder(path).exists():
            raise CheckpointError(
                f"{path} is not complete: not all ranks write to the same disk; give a path that "
                "they share"
            )


def load(
    member: ranks.Rank,
    writer: CheckpointWriter,
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    add_moments: AddMoments,
) -> list[Own]:
    """Load model and optimizer from a checkpoint folder; return what every rank saved besides.

    Where this raises `CheckpointError`, nothing was changed.
    """
    writer.settle()
    with ranks.fail_together(member, "writing the checkpoint before"):
        writer.wait()
    with ranks.fail_together(member, f"reading {path}"):
        folder = find_checkpoint(path)
    with being_read(folder):
        with ranks.fail_together(member, f"reading {folder}"):
            size = member.world_size
            saved = read_checkpoint(folder, lambda number: number % size == member.rank)
            check_state(model, saved)
            own = [_decode(one, folder) for one in saved.own]
            if not own:
                raise CheckpointError(
                    f"{folder} has no file with a rank's own state (counters, random numbers): "
                    f"{_FOREIGN}"
                )
        # From here on nothing may fail: half of it would be loaded.
        load_state(model, optimizer, saved, add_moments)
        return own


def _decode(content: dict[str, Any], folder: Path) -> Own:
    """Return a rank's own state, as `_content` wrote it."""
    try:
        counters = msgspec.convert(content["progress"], Counters)
        rng, extra = content["rng"], content["extra"]
    except (KeyError, msgspec.ValidationError) as error:
        raise CheckpointError(
            f"{folder} lacks a part of a rank's own state ({error}): {_FOREIGN}"
        ) from error
    return Own(counters, rng, extra)


def _state(source: Source) -> dict[str, Tensor]:
    model = {MODEL + k: v for k, v in model_state(source.model).items()}
    moments = optimizer_state(source.model, source.optimizer)
    return model | {OPTIMIZER + k: v for k, v in moments.items()}


def _content(source: Source, state: Mapping[str, Tensor], rank: int) -> Content:
    own = {
        "progress": msgspec.structs.asdict(source.counters),
        "rng": torch.get_rng_state(),
        "extra": dict(source.extra),
    }
    tied = {MODEL + name: MODEL + first for name, first in tied_names(source.model).items()}
    return Content(
        part=part_of_rank(state, rank),
        # Buffers change without an optimizer step.
        at_once={MODEL + name for name, _ in source.model.named_buffers()},
        own=_encoded(own),
        model=source.files if rank == 0 else {},
        aliases={name: first for name, first in tied.items() if name not in state},
    )


def _encoded(own: dict[str, Any]) -> bytes:
    """Encode plain values and tensors now: some of them go on changing."""
    buffer = io.BytesIO()
    torch.save(own, buffer)
    return buffer.getvalue()
