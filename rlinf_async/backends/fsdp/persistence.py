"""Saving and loading one manager: what a checkpoint holds besides the tensors.

Moments and weights are read and written where they are, so nothing has to be onloaded for it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from rlinf_async.backends.fsdp import offload, ranks
from rlinf_async.backends.fsdp.checkpoint import part_of_rank
from rlinf_async.backends.fsdp.errors import CheckpointError
from rlinf_async.backends.fsdp.rooms import new_moments
from rlinf_async.backends.fsdp.state import (
    MODEL,
    OPTIMIZER,
    check_state,
    load_state,
    model_state,
    optimizer_state,
    tied_names,
)
from rlinf_async.backends.fsdp.writer import Content

if TYPE_CHECKING:
    from rlinf_async.backends.fsdp.manager import ShardedModelManager


_NOT_OURS = "it was not written by save_checkpoint()"


class _Progress(msgspec.Struct, frozen=True):
    """How far the training was."""

    steps: int
    skipped_steps: int
    scaler_factor: float
    scaler_good_steps: int


class _Own(NamedTuple):
    """What a rank keeps of its own."""

    progress: _Progress
    rng: Tensor
    extra: dict[str, Any]


def begin(manager: ShardedModelManager, path: Path, extra: Mapping[str, Any]) -> Future[Path]:
    """Start writing a checkpoint folder; see `ShardedModelManager.begin_checkpoint`."""
    writer, staging = manager.checkpoints, staging_folder(path)
    with ranks.together(manager, "writing the checkpoint before"):
        writer.wait()
    with ranks.together(manager, f"preparing {staging}"):
        if manager.rank == 0:
            fresh_staging(path)
    # FSDP1 gathers its state in collectives: they stay outside of what may fail on one rank.
    state = _state(manager)
    with ranks.together(manager, f"copying what goes to {path}"):
        content = _content(manager, state, extra)
        return writer.begin(path, content, manager.rank, manager.world_size, manager.optimizer)


def save(manager: ShardedModelManager, path: Path, extra: Mapping[str, Any]) -> None:
    """Write a checkpoint folder; see `ShardedModelManager.save_checkpoint`."""
    begin(manager, path, extra)
    with ranks.together(manager, f"writing {path}"):
        manager.checkpoints.wait()
    # The last of the ranks has given the folder its name, if they all see the same disk.
    with ranks.together(manager, f"finishing {path}"):
        if manager.rank == 0 and staging_folder(path).exists():
            raise CheckpointError(
                f"{path} is not complete: not all ranks write to the same disk; give a path that "
                "they share"
            )


def load(
    manager: ShardedModelManager, path: Path, *, restore_rng: bool = False
) -> list[dict[str, Any]]:
    """Read a checkpoint folder; see `ShardedModelManager.load_checkpoint`."""
    manager.checkpoints.settle()
    with ranks.together(manager, "writing the checkpoint before"):
        manager.checkpoints.wait()
    with ranks.together(manager, f"reading {path}"):
        folder = find_checkpoint(path)
    with being_read(folder):
        return _load(manager, folder, restore_rng=restore_rng)


def _load(manager: ShardedModelManager, folder: Path, *, restore_rng: bool) -> list[dict[str, Any]]:
    size = manager.world_size
    with ranks.together(manager, f"reading {folder}"):
        saved = read_checkpoint(folder, lambda number: number % size == manager.rank)
        check_state(manager.model, saved)
        own = [_own(one, folder) for one in saved.own]
        if not own:
            raise CheckpointError(f"{folder} has nothing that a rank kept of its own: {_NOT_OURS}")
    # From here on nothing may fail: half of it would be loaded.
    load_state(manager.model, manager.optimizer, saved, partial(new_moments, manager))
    if manager.optimizer_offloaded:
        offload.move_optimizer(manager.optimizer, torch.device("cpu"))
    progress = own[0].progress
    manager.set_progress(progress.steps)
    manager.skipped_steps = progress.skipped_steps
    manager.grad_scaler.factor = progress.scaler_factor
    manager.grad_scaler.good_steps = progress.scaler_good_steps
    if restore_rng:
        torch.set_rng_state(own[manager.rank % len(own)].rng.clone())
    return [one.extra for one in own]


def _own(content: dict[str, Any], folder: Path) -> _Own:
    """What a rank kept of its own, as `_content` wrote it."""
    try:
        progress = msgspec.convert(content["progress"], _Progress)
        rng, extra = content["rng"], content["extra"]
    except (KeyError, msgspec.ValidationError) as error:
        raise CheckpointError(
            f"{folder} lacks something that every rank keeps of its own ({error}): {_NOT_OURS}"
        ) from error
    return _Own(progress, rng, extra)


def _state(manager: ShardedModelManager) -> dict[str, Tensor]:
    model = {MODEL + k: v for k, v in model_state(manager.model).items()}
    moments = optimizer_state(manager.model, manager.optimizer)
    return model | {OPTIMIZER + k: v for k, v in moments.items()}


def _content(
    manager: ShardedModelManager, state: Mapping[str, Tensor], extra: Mapping[str, Any]
) -> Content:
    own = {
        "progress": msgspec.structs.asdict(
            _Progress(
                steps=manager.steps,
                skipped_steps=manager.skipped_steps,
                scaler_factor=manager.grad_scaler.factor,
                scaler_good_steps=manager.grad_scaler.good_steps,
            )
        ),
        "rng": torch.get_rng_state(),
        "extra": dict(extra),
    }
    tied = {MODEL + name: MODEL + first for name, first in tied_names(manager.model).items()}
    return Content(
        part=part_of_rank(state, manager.rank),
        at_once=_buffers(manager.model),
        own=_encoded(own),
        model=manager.model_files() if manager.rank == 0 else {},
        aliases={name: first for name, first in tied.items() if name not in state},
    )


def _buffers(model: nn.Module) -> set[str]:
    """Names of what changes without an optimizer step."""
    return {MODEL + name for name, _ in model.named_buffers()}


def _encoded(own: dict[str, Any]) -> bytes:
    """Plain values and tensors as bytes, now: some of them go on changing."""
    buffer = io.BytesIO()
    torch.save(own, buffer)
    return buffer.getvalue()
