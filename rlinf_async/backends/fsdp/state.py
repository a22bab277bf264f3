"""Sharding a model over the ranks; its state, and its optimizer's, by name.

Names are ``"model.NAME"`` and ``"optimizer.NAME.exp_avg"``. Values are the live tensors (FSDP2,
plain) or sharded copies of them (FSDP1); each rank has its own shards. A rank writes its `RankPart`
of them into a checkpoint: of a sharded tensor a range of rows, dealt as by ``torch.chunk``; tensors
that are the same on all ranks are written by rank 0 alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from rlinf_async.backends.checkpoint.folders import CheckpointError
from rlinf_async.backends.checkpoint.reading import Saved, SavedTensor
from rlinf_async.backends.checkpoint.tensor_file import Box, RankPart, TensorEntry, in_file_order

Shards = dict[str, Tensor]
"""what one rank holds of some tensors, by their names"""


def shard(
    model: nn.Module,
    strategy: Literal["fsdp1", "fsdp2"],
    world_size: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Return the model, sharded over the ``world_size`` ranks of a group (torch's default one).

    At world size 1 it stays a plain module: there is nothing to shard, and the hooks of FSDP cost
    more than the arithmetic of a small policy.
    Every block of a transformer (the ModuleList with the most numbers) is a unit of its own, so
    that no more than two blocks are unsharded at a time.
    """
    if world_size == 1:
        return model
    if group is None:
        mesh = init_device_mesh(device.type, (world_size,))
    else:
        mesh = DeviceMesh.from_group(group, device.type)
    if strategy == "fsdp1":
        return FullyShardedDataParallel(
            model, use_orig_params=True, device_mesh=mesh, device_id=device
        )
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for block in max(lists, key=_numbers, default=[]):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gc.collect(1)  # a function of torch's that refers to itself, and holds the model until then
    return model


def _numbers(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def reshard(model: nn.Module) -> None:
    """Shard parameters again that a forward pass without a backward one left unsharded.

    FSDP keeps those of the outermost module for the backward pass; weights that change before the
    next forward pass would then be ignored by it.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            module._handle.reshard(free_unsharded_flat_param=True)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that was sharded: FSDP1 wraps it, FSDP2 makes it a subclass of itself."""
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def local_shard(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: DTensor) -> int:
    """Return the first global row of this rank's shard (rows are dealt as by ``torch.chunk``)."""
    mesh = tensor.device_mesh
    chunk = -(-tensor.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * chunk, tensor.shape[0])


def sharded_like(target: Tensor, local: Tensor) -> Any:
    """Return a shard as what the target is: a parameter or a tensor, sharded in the same way."""
    made = local
    if isinstance(target, DTensor):
        made = DTensor.from_local(
            local,
            target.device_mesh,
            target.placements,
            run_check=False,
            shape=target.shape,
            stride=target.stride(),
        )
    if isinstance(target, nn.Parameter):
        return nn.Parameter(made, requires_grad=target.requires_grad)
    return made


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
MODEL, OPTIMIZER = "model.", "optimizer."
AddMoments = Callable[[Mapping[str, Tensor]], None]
"""gives the optimizer zero moments of these parameters"""
MOMENTS: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
"""AdamW's moments of each parameter"""


def part_of_rank(state: Mapping[str, Tensor], rank: int) -> RankPart:
    """Return what this rank has to write of ``state``: its shards, and on rank 0 whole tensors."""
    entries: list[TensorEntry] = []
    shapes: dict[str, tuple[int, ...]] = {}
    live: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if rank and not isinstance(tensor, DTensor):
            continue
        local = local_shard(tensor).detach()
        size = tuple(local.shape)
        entries.append(TensorEntry(name, local.dtype, size, (Box(name, _start(tensor), size, 0),)))
        shapes[name], live[name] = tuple(tensor.shape), local
    return RankPart(in_file_order(entries), shapes, live)


def check_fits(target: Tensor, saved: SavedTensor, name: str) -> None:
    """Raise `CheckpointError` unless the saved tensor has the target's shape and dtype."""
    if saved.shape != tuple(target.shape):
        raise CheckpointError(
            f"{name!r} is {list(saved.shape)} in {saved.file}, {list(target.shape)} in the model"
        )
    if saved.dtype != target.dtype:
        raise CheckpointError(
            f"{name!r} is {saved.dtype} in {saved.file}, {target.dtype} in the model"
        )


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
    if not any(map(_renames, model.modules())):
        return _tensors(model.state_dict())  # the same, in a twentieth of the time
    return _tensors(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state of each parameter; empty before its first step."""
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


def moment_shards(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> Shards:
    """Return this rank's shards of one kind of moment, by the name of the parameter."""
    return {
        name: local_shard(optimizer.state[parameter][kind])
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def set_moments(
    optimizer: torch.optim.Optimizer, parameter: Tensor, steps: float, shards: Mapping[str, Tensor]
) -> None:
    """Make these very shards, by kind, the optimizer's state of a parameter."""
    # The fused optimizer keeps the step beside its parameter.
    step = torch.tensor(steps, dtype=torch.float32, device=parameter.device)
    plain = parameter.detach()
    optimizer.state[parameter] = {"step": step} | {
        kind: sharded_like(plain, shard) for kind, shard in shards.items()
    }


def load_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Saved, add_moments: AddMoments
) -> None:
    """Make a checkpoint the state of model and optimizer, under the sharding there is now.

    Collective for FSDP1. Call `check_state` first.
    """
    weights, moments = saved_weights(model, saved), _part(saved, OPTIMIZER)
    present = model_state(model)
    for name, tensor in present.items():
        _fill(tensor, weights[name])
    if isinstance(model, FullyShardedDataParallel):
        set_model_state_dict(model, dict(present))
        _load_moments_fsdp1(model, optimizer, moments)
    else:
        _load_moments(model, optimizer, moments, add_moments)


def take_weights(model: nn.Module, found: Mapping[str, SavedTensor]) -> None:
    """Make saved tensors those of the model, by its names; the others stay as they are.

    Collective for FSDP1. Raises `CheckpointError` where one does not fit; then nothing has changed.
    """
    present = model_state(model)
    for name, saved in found.items():
        check_fits(present[name], saved, name)
    for name, saved in found.items():
        _fill(present[name], saved)
    if isinstance(model, FullyShardedDataParallel):
        set_model_state_dict(model, dict(present))


def check_state(model: nn.Module, saved: Saved) -> None:
    """Raise `CheckpointError` unless names, shapes and dtypes fit the model; nothing is written."""
    weights, moments = saved_weights(model, saved), _part(saved, OPTIMIZER)
    present = model_state(model)
    faults = [f"missing {name!r}" for name in present if name not in weights]
    faults += [f"unexpected {name!r}" for name in weights if name not in present]
    if faults:
        raise CheckpointError(
            f"{saved.folder} is of another model: {'; '.join(faults[:8])}. Use the configuration "
            "it was written with"
        )
    for name, tensor in present.items():
        check_fits(tensor, weights[name], name)
        if f"{name}.step" in moments:
            check_fits(torch.zeros(()), moments[f"{name}.step"], f"{name}.step")
            for key in MOMENTS:
                check_fits(tensor, moments[f"{name}.{key}"], f"{name}.{key}")


def _start(tensor: Tensor) -> tuple[int, ...]:
    """Return where this rank's part of a tensor begins."""
    rows = (first_row(tensor),) if isinstance(tensor, DTensor) else (0,)
    return (rows + (0,) * tensor.ndim)[: tensor.ndim]


def _fill(target: Tensor, saved: SavedTensor) -> None:
    """Copy the part that this rank holds of ``target`` out of a checkpoint, in place."""
    saved.fill(local_shard(target).detach(), _start(target))


def _part(saved: Saved, prefix: str) -> dict[str, SavedTensor]:
    found = saved.tensors
    return {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}


def saved_weights(model: nn.Module, saved: Saved) -> dict[str, SavedTensor]:
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
    add_moments: AddMoments,
) -> None:
    optimizer.state.clear()
    stepped = {name: one for name, one in model.named_parameters() if f"{name}.step" in moments}
    add_moments(stepped)
    for name, parameter in stepped.items():
        state = optimizer.state[parameter]
        state["step"].copy_(moments[f"{name}.step"].whole())
        for key in MOMENTS:
            _fill(state[key], moments[f"{name}.{key}"])


def _load_moments_fsdp1(
    model: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, SavedTensor]
) -> None:
    if not moments:
        optimizer.state.clear()
        return
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    for name, tensor in _tensors(flat).items():
        _fill(tensor, moments[name.removeprefix("state.")])
    set_optimizer_state_dict(model, optimizer, flat, options=FLAT)


def _renames(module: nn.Module) -> bool:
    """Whether a module's own state dict has shards, or other names than those of its model."""
    compiled = hasattr(module, "_orig_mod")  # by torch.compile
    return compiled or isinstance(module, FSDPModule | FullyShardedDataParallel)


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
