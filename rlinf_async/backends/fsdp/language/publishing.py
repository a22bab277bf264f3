"""Weights under the names that transformers and the engines know them by."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.state import full_model_state
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights import WeightsMismatch, check_fit, unpack, verify

PREFIX = "language."


def hugging_face_state(
    manager: FSDPModelManager, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return whole weights by their Hugging Face names on rank 0, ``{}`` elsewhere. Collective.

    Tied weights come once, under the name of the input embedding. Only one tensor at a time is
    whole on the device. The tensors may be the live ones.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in named_weights(manager):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if manager.rank == 0:
            there = whole.to(dtype) if whole.is_floating_point() else whole
            found[name] = there.detach().cpu()
    return found


def load_hugging_face_state(manager: FSDPModelManager, update: WeightUpdate) -> None:
    """Copy published weights into the model of a single rank.

    Floating-point tensors may have another precision. Raises `WeightsError` before anything
    changed.
    """
    if manager.world_size != 1:
        raise ValueError(
            f"published weights can be loaded by a rank on its own only, not by one of "
            f"{manager.world_size}: launch inference workers without collective="
        )
    verify(update)
    present = dict(named_weights(manager))
    arrived = {
        name: tensor.to(present[name].dtype)
        if name in present and tensor.is_floating_point() and present[name].is_floating_point()
        else tensor
        for name, tensor in unpack(update).items()
    }
    check_fit(arrived, present, f"weights version {update.version}")
    with torch.no_grad():
        for name, tensor in arrived.items():
            present[name].copy_(tensor)


def named_weights(manager: FSDPModelManager) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by their Hugging Face names, sharded as they are; those of FSDP1 whole.

    Tied ones come once. Collective for FSDP1. Raises `WeightsMismatch` for a critic.
    """
    sharded = manager.model
    whole = isinstance(sharded, FullyShardedDataParallel)
    state = full_model_state(sharded) if whole else sharded.state_dict()
    for name, tensor in state.items():
        if name in manager.tied_names:
            continue
        if not name.startswith(PREFIX):
            raise WeightsMismatch(
                f"{name!r} has no name that an engine knows: a critic cannot be published"
            )
        yield name.removeprefix(PREFIX), tensor
