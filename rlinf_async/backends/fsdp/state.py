"""Model and optimizer state by name: ``"model.NAME"``, ``"optimizer.NAME.exp_avg"``.

Values are the live tensors (FSDP2, plain) or sharded copies of them (FSDP1); each rank sees its own
shards. Filling the values and calling `load_state` makes them the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

from rlinf_async.backends.checkpoint.reading import Saved, SavedTensor
from rlinf_async.backends.fsdp.checkpoint import check_fits, fill
from rlinf_async.backends.fsdp.errors import CheckpointError

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
MODEL, OPTIMIZER = "model.", "optimizer."
NewMoments = Callable[[Mapping[str, Tensor]], None]
"""gives the optimizer zero moments of these parameters"""
MOMENTS: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
"""what AdamW keeps of each parameter, besides the step"""


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, sharded as they are; tied ones once (but for FSDP1)."""
    if isinstance(model, FullyShardedDataParallel):
        return _tensors(get_model_state_dict(model))
    tied = tied_names(model)
    return {name: one for name, one in _tensors(model.state_dict()).items() if name not in tied}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of parameters that have several: name -> the first of its names."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    return {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[id(parameter)] != name
    }


def full_model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return whole parameters and buffers, on every rank. Collective where sharded."""
    return _tensors(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return what the optimizer remembers of each parameter; empty before its first step."""
    if not optimizer.state:
        return {}
    if isinstance(model, FullyShardedDataParallel):
        flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
        return {k.removeprefix("state."): v for k, v in _tensors(flat).items()}
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Saved, new_moments: NewMoments
) -> None:
    """Make a checkpoint the state of model and optimizer, under the sharding there is now.

    Collective for FSDP1. Call `check_state` first.
    """
    weights, moments = _weights(model, saved), _part(saved, OPTIMIZER)
    present = model_state(model)
    for name, tensor in present.items():
        fill(tensor, weights[name])
    if isinstance(model, FullyShardedDataParallel):
        set_model_state_dict(model, dict(present))
        _load_moments_fsdp1(model, optimizer, moments)
    else:
        _load_moments(model, optimizer, moments, new_moments)


def check_state(model: nn.Module, saved: Saved) -> None:
    """Raise `CheckpointError` unless names, shapes and dtypes fit the model; nothing is written."""
    weights, moments = _weights(model, saved), _part(saved, OPTIMIZER)
    present = model_state(model)
    faults = [f"missing {name!r}" for name in present if name not in weights]
    faults += [f"unexpected {name!r}" for name in weights if name not in present]
    if faults:
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(faults[:8])}. Use the configuration "
            "it was written with"
        )
    for name, tensor in present.items():
        check_fits(tensor, weights[name], name)
        held = [key for key in (*MOMENTS, "step") if f"{name}.{key}" in moments]
        if held and len(held) <= len(MOMENTS):
            raise CheckpointError(f"of the optimizer's state of {name!r} there is only {held}")
        for key in MOMENTS:
            if key in held:
                check_fits(tensor, moments[f"{name}.{key}"], f"{name}.{key}")


def _part(saved: Saved, prefix: str) -> dict[str, SavedTensor]:
    found = saved.tensors
    return {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}


def _weights(model: nn.Module, saved: Saved) -> dict[str, SavedTensor]:
    """The saved weights by the names of this model's state, where FSDP1 has tied ones twice."""
    whole = saved.tensors
    again = {name: whole[first] for name, first in saved.aliases.items() if name not in whole}
    weights = _part(saved._replace(tensors=whole | again), MODEL)
    if isinstance(model, FullyShardedDataParallel):
        return weights
    tied = tied_names(model)
    return {name: one for name, one in weights.items() if name not in tied}


def _load_moments(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    moments: Mapping[str, SavedTensor],
    new_moments: NewMoments,
) -> None:
    optimizer.state.clear()
    stepped = {name: one for name, one in model.named_parameters() if f"{name}.step" in moments}
    new_moments(stepped)
    for name, parameter in stepped.items():
        state = optimizer.state[parameter]
        state["step"].copy_(moments[f"{name}.step"].whole())
        for key in MOMENTS:
            fill(state[key], moments[f"{name}.{key}"])


def _load_moments_fsdp1(
    model: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, SavedTensor]
) -> None:
    if not moments:
        optimizer.state.clear()
        return
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    for name, tensor in _tensors(flat).items():
        fill(tensor, moments[name.removeprefix("state.")])
    set_optimizer_state_dict(model, optimizer, flat, options=FLAT)


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
