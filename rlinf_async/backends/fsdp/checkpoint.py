"""Saving and loading one rank's model, and what a checkpoint holds besides the tensors: counters,
parameter groups, loss scaling.

Moments and weights are read and written where they are, so nothing has to be onloaded for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.checkpoint import collectives
from rlinf_async.backends.checkpoint.collectives import (
    Counters,
    Own,
    encode_own,
    prepare_writing,
    reading_together,
)
from rlinf_async.backends.checkpoint.folders import CheckpointError, staging_folder
from rlinf_async.backends.checkpoint.writing import CheckpointWriter, Content, ModelFiles
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

FSDP1_PREFIX = "_fsdp_wrapped_module."


def parameter_groups(
    model: nn.Module, value_names: set[str], config: OptimizerConfig, *, freeze_rest: bool
) -> list[dict[str, Any]]:
    """Return the groups ``policy`` and ``value``, without empty ones.

    ``freeze_rest`` marks the policy's group frozen, for the critic's warm-up; raises `ValueError`
    when the model has no value parameters to warm up.
    """
    split: dict[str, list[nn.Parameter]] = {"policy": [], "value": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain = name.replace(FSDP1_PREFIX, "")
            split["value" if plain in value_names else "policy"].append(parameter)
    if freeze_rest and not split["value"]:
        raise ValueError(
            "critic_warmup_steps is set, but the model names no parameters that only the value "
            "uses (value_parameter_names); set it to 0 or use a policy with a critic"
        )
    rates = {"policy": config.lr, "value": config.value_lr or config.lr}
    return [
        {
            "params": parameters,
            "lr": rates[group],
            "name": group,
            "frozen": freeze_rest and group == "policy",
        }
        for group, parameters in split.items()
        if parameters
    ]


class LossScaler:
    """Multiplies the loss so that float16 gradients do not vanish (Micikevicius et al. 2018).

    It halves its factor when a step was skipped, and doubles it after ``growth_interval`` good
    steps. Unlike torch's GradScaler it is given whether the (global) gradient norm was finite, so
    that all ranks always agree. A scaler that is not enabled keeps the factor at 1.
    """

    def __init__(self, *, enabled: bool, growth_interval: int = 2000) -> None:
        self.enabled = enabled
        self.factor = 2.0**16 if enabled else 1.0
        self.growth_interval = growth_interval
        self.good_steps = 0

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate."""
        return loss * self.factor if self.enabled else loss

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide the gradients by the factor, in place."""
        if self.enabled:
            for gradient in gradients:
                gradient.div_(self.factor)

    def update(self, *, finite: bool) -> None:
        """Choose the next factor, given whether this step's gradient norm was finite."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.factor /= 2.0
        elif self.good_steps == self.growth_interval:
            self.factor *= 2.0
            self.good_steps = 0


class SavedModel(NamedTuple):
    """A model with its optimizer, as one rank saves it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    counters: Counters
    extra: Mapping[str, Any]
    files: ModelFiles
    """files kept beside the tensors, to export the model from; rank 0's"""


def begin(
    member: collectives.Rank, writer: CheckpointWriter, path: Path, source: SavedModel
) -> Future[Path]:
    """Start writing a checkpoint folder; see `FSDPModelManager.begin_checkpoint`."""
    prepare_writing(member, writer, path)
    # FSDP1 gathers its state in collectives: they stay outside of what may fail on one rank.
    state = _state(source)
    with collectives.fail_together(member, f"copying what goes to {path}"):
        content = _content(source, state, member.rank)
        return writer.begin(path, content, member.rank, member.world_size, source.optimizer)


def save(
    member: collectives.Rank, writer: CheckpointWriter, path: Path, source: SavedModel
) -> None:
    """Write a checkpoint folder; see `FSDPModelManager.save_checkpoint`."""
    begin(member, writer, path, source)
    with collectives.fail_together(member, f"writing {path}"):
        writer.wait()
    # The last of the ranks has renamed the folder, if they all see the same disk.
    with collectives.fail_together(member, f"finishing {path}"):
        if member.rank == 0 and staging_folder(path).exists():
            raise CheckpointError(
                f"{path} is not complete: not all ranks write to the same disk; give a path that "
                "they share"
            )


def load(
    member: collectives.Rank,
    writer: CheckpointWriter,
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    add_moments: AddMoments,
) -> list[Own]:
    """Load model and optimizer from a checkpoint folder; return what every rank saved besides.

    Where this raises `CheckpointError`, nothing was changed.
    """
    with reading_together(member, writer, path, partial(check_state, model)) as (saved, own):
        # From here on nothing may fail: half of it would be loaded.
        load_state(model, optimizer, saved, add_moments)
    return own


def _state(source: SavedModel) -> dict[str, Tensor]:
    model = {MODEL + k: v for k, v in model_state(source.model).items()}
    moments = optimizer_state(source.model, source.optimizer)
    return model | {OPTIMIZER + k: v for k, v in moments.items()}


def _content(source: SavedModel, state: Mapping[str, Tensor], rank: int) -> Content:
    tied = {MODEL + name: MODEL + first for name, first in tied_names(source.model).items()}
    return Content(
        part=part_of_rank(state, rank),
        # Buffers change without an optimizer step.
        at_once={MODEL + name for name, _ in source.model.named_buffers()},
        own=encode_own(source.counters, source.extra),
        model=source.files if rank == 0 else {},
        aliases={name: first for name, first in tied.items() if name not in state},
    )
