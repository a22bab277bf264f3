"""Saving and loading one manager: what a checkpoint holds besides the tensors' slices.

Moments and weights are read and written where they are, so nothing has to be onloaded for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlinf_async.backends.fsdp import offload, ranks
from rlinf_async.backends.fsdp.checkpoint import (
    FORMAT,
    Metadata,
    commit,
    gather,
    read_files,
    slices,
    staging_folder,
    write_file,
)
from rlinf_async.backends.fsdp.state import (
    MODEL,
    OPTIMIZER,
    check_state,
    load_state,
    model_state,
    optimizer_state,
)

if TYPE_CHECKING:
    from rlinf_async.backends.fsdp.manager import ShardedModelManager


def save(manager: ShardedModelManager, path: Path, extra: Mapping[str, Any]) -> None:
    """Write a checkpoint folder; see `ShardedModelManager.save_checkpoint`."""
    staging = staging_folder(path)
    with ranks.together(manager, f"preparing {staging}"):
        if manager.rank == 0:
            ranks.fresh_folder(staging)
    # FSDP1 gathers its state in collectives: they stay outside of what may fail on one rank.
    content = _content(manager, extra)
    with ranks.together(manager, f"writing {staging}"):
        name = f"rank_{manager.rank}_of_{manager.world_size}.pt"
        record = write_file(staging, name, content)
    files = ranks.exchange_records(manager, record)
    with ranks.together(manager, f"finishing {path}"):
        if manager.rank == 0:
            metadata = Metadata(format=FORMAT, world_size=manager.world_size, files=files)
            commit(path, metadata)


def load(
    manager: ShardedModelManager, path: Path, *, restore_rng: bool = False
) -> list[dict[str, Any]]:
    """Read a checkpoint folder; see `ShardedModelManager.load_checkpoint`."""
    with ranks.together(manager, f"reading {path}"):
        files = read_files(path)
        saved = gather(file["state"] for file in files)
        check_state(manager.model, saved)
    load_state(manager.model, manager.optimizer, saved)
    if manager.optimizer_offloaded:
        offload.move_optimizer(manager.optimizer, torch.device("cpu"))
    progress = files[0]["progress"]
    manager.set_progress(progress["steps"])
    manager.skipped_steps = progress["skipped_steps"]
    manager.grad_scaler.factor = progress["scaler_factor"]
    manager.grad_scaler.good_steps = progress["scaler_good_steps"]
    if restore_rng:
        torch.set_rng_state(files[manager.rank % len(files)]["rng"].clone())
    return [file["extra"] for file in files]


def _content(manager: ShardedModelManager, extra: Mapping[str, Any]) -> dict[str, Any]:
    model = {MODEL + k: v for k, v in model_state(manager.model).items()}
    moments = optimizer_state(manager.model, manager.optimizer)
    progress = {
        "steps": manager.steps,
        "skipped_steps": manager.skipped_steps,
        "scaler_factor": manager.grad_scaler.factor,
        "scaler_good_steps": manager.grad_scaler.good_steps,
    }
    return {
        "state": slices(model | {OPTIMIZER + k: v for k, v in moments.items()}, manager.rank),
        "progress": progress,
        "rng": torch.get_rng_state(),
        "extra": dict(extra),
    }
