"""Weights of a policy under the names and in the shapes of Hugging Face checkpoints.

::

    sharded model --policy_weights-> tensors in memory --Slice.of--> tensors of a checkpoint

A weight that has an adapter is published with it: ``W + s B A``, one tensor at a time, in memory of
its own. Each rank computes the whole product, so that the bits do not depend on the ranks.

Invariants: the tensors come in the order of the model, tied ones once, on every rank the same; the
live weights are only read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from rlinf_async.backends.fsdp.language.network import PolicyNetwork
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.sharding import finish_copies, moved
from rlinf_async.backends.fsdp.state import first_row, full_model_state, local_shard
from rlinf_async.backends.language_training.lora import (
    LowRank,
    adapted,
    factors_of,
    is_of_adapter,
    low_rank,
)
from rlinf_async.backends.language_training.weights import OwnParts, PlacedPart
from rlinf_async.backends.transformers.tensors import Slice
from rlinf_async.messages.weights import WeightsMismatch, WeightUpdate
from rlinf_async.weights.pack import check_fit, unpack, verify

PREFIX = "language."
CPU = torch.device("cpu")


class Weights(NamedTuple):
    """A policy's weights, and the tensors of a checkpoint that lie in them."""

    memory: Mapping[str, Tensor]
    """tensors by name in memory; sharded as they are, those of FSDP1 whole"""
    slices: Mapping[str, Slice]
    """slices by name in the checkpoint"""
    updates: Mapping[str, LowRank]
    """updates by adapters, whole, by name of the weight in memory"""


def policy_weights(manager: FSDPModelManager) -> Weights:
    """Return the live weights. Collective for FSDP1, and where there is an adapter.

    Raises `WeightsMismatch` for a critic.
    """
    sharded = manager.model
    whole = isinstance(sharded, FullyShardedDataParallel)
    network = sharded.module if whole else sharded
    if not isinstance(network, PolicyNetwork):
        raise WeightsMismatch("a critic has no language model's head: it cannot be published")
    state = full_model_state(sharded) if whole else sharded.state_dict()
    memory = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    factors = {name: whole_of(one) for name, one in memory.items() if is_of_adapter(name)}
    scale = next((one.scale for _, one in adapted(network)), 1.0)
    return Weights(memory, network.published, low_rank(factors, scale))


def adapter_state(manager: FSDPModelManager) -> dict[str, Tensor]:
    """Return an adapter's tensors by name in memory, on the CPU: ``{}`` where there is none, and on
    other ranks than 0. Collective."""
    factors = factors_of(policy_weights(manager).updates)
    return {} if manager.rank else {name: one.to(CPU) for name, one in factors.items()}


def whole_of(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached. Collective where it is sharded."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()


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
        whole = whole_of(weights.memory[tensor])
        if manager.rank == 0:
            if tensor in weights.updates:
                whole = whole + weights.updates[tensor].whole()
            there = whole.to(dtype) if whole.is_floating_point() else whole
            there = moved(there, CPU)
            found |= {name: weights.slices[name].of(there) for name in names}
    finish_copies(manager.device)
    return found


def load_hugging_face_state(manager: FSDPModelManager, update: WeightUpdate) -> None:
    """Copy published weights into the model of a single rank: all of them, or into a model with an
    adapter the adapter alone.

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
    if weights.updates:
        present = {name: one for name, one in weights.memory.items() if is_of_adapter(name)}
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


def own_rows(manager: FSDPModelManager, dtype: torch.dtype) -> OwnParts | None:
    """Return the rows of published weights that this rank writes; None where weights have to be
    gathered: for one rank, and for FSDP1."""
    if manager.world_size == 1 or isinstance(manager.model, FullyShardedDataParallel):
        return None
    weights = policy_weights(manager)
    if not _by_rows(weights.memory.values()):
        return None
    tensors, parts = {}, {}
    for name, one in weights.slices.items():
        live = weights.memory[one.tensor]
        kind = dtype if live.is_floating_point() else live.dtype
        tensors[name] = torch.empty(one.shape, dtype=kind, device="meta")
        parts[name] = _rows(live, one, manager.rank, weights.updates.get(one.tensor))
    return OwnParts(tensors, parts)


def _by_rows(tensors: Iterable[Tensor]) -> bool:
    sharded = [one for one in tensors if isinstance(one, DTensor)]
    return all(one.device_mesh.ndim == 1 and one.placements == (Shard(0),) for one in sharded)


def _rows(live: Tensor, wanted: Slice, rank: int, update: LowRank | None) -> list[PlacedPart]:
    """Return the elements of a slice that this rank writes: at most one range.

    ``update``: what is added to the tensor.
    """
    local = local_shard(live).detach()
    first = 0
    if isinstance(live, DTensor):
        first = first_row(live) * math.prod(live.shape[1:])
    elif rank:
        return []  # the same on all ranks: rank 0 writes it
    start = max(wanted.offset, first)
    end = min(wanted.offset + wanted.elements, first + local.numel())
    if start >= end:
        return []
    own = local.reshape(-1)[start - first : end - first]

    def added() -> Tensor:
        assert update is not None
        return update.whole().reshape(-1)[start:end]

    computed = None if update is None else added
    return [PlacedPart(own, (end - start,), (1,), start - wanted.offset, computed)]
