"""Weights under the names and in the shapes of Hugging Face checkpoints.

::

    sharded model --policy_weights-> tensors in memory --Slice.of--> tensors of a checkpoint

Invariant: the tensors come in the order of the model, tied ones once, on every rank the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from rlinf_async.backends.fsdp.language.network import PolicyNetwork
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.offload import finish_copies, moved
from rlinf_async.backends.fsdp.state import full_model_state
from rlinf_async.backends.transformers.tensors import Slice
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights import WeightsMismatch, check_fit, unpack, verify

PREFIX = "language."
CPU = torch.device("cpu")


class Weights(NamedTuple):
    """A policy's weights, and the tensors of a checkpoint that lie in them."""

    memory: Mapping[str, Tensor]
    """by name in memory; sharded as they are, those of FSDP1 whole"""
    slices: Mapping[str, Slice]
    """by name in the checkpoint"""


def policy_weights(manager: FSDPModelManager) -> Weights:
    """Return the live weights. Collective for FSDP1. Raises `WeightsMismatch` for a critic."""
    sharded = manager.model
    whole = isinstance(sharded, FullyShardedDataParallel)
    network = sharded.module if whole else sharded
    if not isinstance(network, PolicyNetwork):
        raise WeightsMismatch("a critic has no language model's head: it cannot be published")
    state = full_model_state(sharded) if whole else sharded.state_dict()
    memory = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    return Weights(memory, network.published)


def hugging_face_state(
    manager: FSDPModelManager, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return whole weights by their names in a checkpoint on rank 0, ``{}`` elsewhere. Collective.

    Tied weights come once, under the name of the input embedding. Only one tensor at a time is
    whole on the device. The tensors may be the live ones.
    """
    weights = policy_weights(manager)
    by_tensor: dict[str, list[str]] = {}
    for name, one in weights.slices.items():
        by_tensor.setdefault(one.tensor, []).append(name)
    found: dict[str, Tensor] = {}
    for tensor, names in by_tensor.items():
        sharded = weights.memory[tensor]
        whole = sharded.full_tensor() if isinstance(sharded, DTensor) else sharded
        if manager.rank == 0:
            there = whole.to(dtype) if whole.is_floating_point() else whole
            there = moved(there.detach(), CPU)
            found |= {name: weights.slices[name].of(there) for name in names}
    finish_copies(manager.device)
    return found


def load_hugging_face_state(manager: FSDPModelManager, update: WeightUpdate) -> None:
    """Copy published weights into the model of a single rank.

    Floating-point tensors may have another precision. Raises `WeightsError` before anything
    changed.
    """
    if manager.world_size != 1:
        raise ValueError(
            f"published weights can be loaded by a single rank only, not by one of "
            f"{manager.world_size}: launch inference workers without collective="
        )
    verify(update)
    weights = policy_weights(manager)
    present = {name: one.of(weights.memory[one.tensor]) for name, one in weights.slices.items()}
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
