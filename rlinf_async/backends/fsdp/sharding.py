"""The shards of one rank: process groups of the ranks that hold them, memory for them, their way
between accelerator and CPU, and models that are built from them.

On the CPU a shard has its place by where it is in the whole tensor (`reshard.reserved`), so that
what a rank keeps in a rescale stays where it is. Parameters and moments are put in their places
from the beginning; those that came to lie elsewhere are copied there by the next rescale.

::

    module, before it is sharded --deepcopy--> meta model, on torch's meta device
    meta model --deepcopy--> sharded over n ranks --shards put in--> a model that trains

Invariant: a meta model has no storage, and what is built from it shares nothing with the model that
trains meanwhile.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from rlinf_async.backends.fsdp.config import FSDPError
from rlinf_async.backends.fsdp.state import (
    MOMENTS,
    Shards,
    local_shard,
    set_moments,
    shard,
    sharded_like,
)
from rlinf_async.backends.rescale.rescale import Storages, TransferGroup, new_group
from rlinf_async.backends.reshard import (
    BufferState,
    ExchangeReport,
    Reservations,
    allocate,
    reshard,
)
from rlinf_async.parallel import (
    FSDP2,
    GlobalTensor,
    Layout,
    Model,
    Parameter,
    Plan,
    Strategy,
    layout,
    nested_order,
    plan,
)

TRAINING_LIMIT = timedelta(minutes=5)
"""longest duration of one collective of the model"""


def order_of(ranks: int) -> tuple[int, ...]:
    """Return the active ranks in the order of the shards that they hold.

    That is `nested_order`, which moves few rows when the number of ranks changes, where torch can
    make a group in that order, as 2.13 can; else the order of their numbers.
    """
    return nested_order(ranks) if _can_order() else tuple(range(ranks))


class Groups:
    """Process groups of the first n of ``launched`` ranks. None stands for torch's default group.

    One group serves all collectives of the active ranks. Its order is that in which they hold
    shards (`order_of`), since the mesh of a model depends on it. A second group, in the order of
    the ranks, would cost its connections (with NCCL, memory) and could break alone; of the
    collectives, only `all_gather` depends on the order in the group, and it returns tensors by
    rank.

    Every rank makes every group, at the same place of the program, also those it is not in: torch
    counts them. They are never replaced: making one costs connections, and torch remembers the
    group of a mesh by its ranks. State is moved in a group of its own: `TransferGroup`.
    """

    def __init__(self, launched: int) -> None:
        self.launched = launched
        self._active: dict[int, dist.ProcessGroup | None] = {1: None, launched: None}
        self.transfer = TransferGroup()

    def launch(self) -> dist.ProcessGroup | None:
        """Return the group in which all launched ranks train a model that can be rescaled.

        Collective. Torch's default group where `order_of` is the order of their numbers; else a new
        one.
        """
        order = order_of(self.launched)
        if order != tuple(range(self.launched)):
            self._active[self.launched], failed = new_group(order, TRAINING_LIMIT)
            if failed is not None:
                raise failed
        return self._active[self.launched]

    @property
    def sizes(self) -> list[int]:
        """Numbers of active ranks for which there is a group."""
        return list(self._active)

    def prepare(self, size: int, *, known: bool) -> None:
        """Make the group of the first ``size`` ranks, if it is missing. Collective.

        ``known``: all ranks have that size in `sizes`. Raises the `RuntimeError` of torch when a
        rank cannot be reached; another attempt may be made.
        """
        if known:
            return
        self._active[size], failed = new_group(order_of(size), TRAINING_LIMIT)
        if failed is not None:
            del self._active[size]
            raise failed

    def active(self, size: int) -> dist.ProcessGroup | None:
        """Return the group of the first ``size`` ranks, which was prepared."""
        return self._active[size]


def _can_order() -> bool:
    """Whether torch can make a group with its ranks in another order than that of their numbers.

    With TorchComms it cannot.
    """
    if getattr(getattr(dist, "config", None), "use_torchcomms", False):
        return False
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


log = logging.getLogger(__name__)


def rank_device(name: str, world_size: int, rank: int) -> str:
    """Return the device of a rank: several ranks on ``"cuda"`` have one each, by number."""
    return f"cuda:{rank}" if name == "cuda" and world_size > 1 else name


def existing_device(name: str) -> torch.device:
    """Return the device called ``name``; raises `ValueError` when it does not exist."""
    device = torch.device(name)
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise ValueError(
            f"device is {name!r}, but torch sees {found} CUDA devices; set device to 'cpu', or "
            "check CUDA_VISIBLE_DEVICES and whether the installed torch has CUDA"
        )
    return device


def check_strategy(strategy: str, world_size: int, device: torch.device) -> None:
    """Raise `FSDPError` where parameters cannot be moved: FSDP1 manages their storage itself."""
    if strategy == "fsdp1" and world_size > 1 and device.type != "cpu":
        raise FSDPError(
            f"strategy 'fsdp1' cannot offload from {device}: use strategy 'fsdp2' to offload"
        )


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move parameters, their gradients and buffers; does nothing where all are there already."""
    tensors = (*model.parameters(), *model.buffers())
    left = {tensor.device for tensor in tensors if tensor.device != device}
    if left:
        model._apply(lambda tensor: moved(tensor, device))  # type: ignore[no-untyped-call]
        finish_copies(*left, device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's state (moments, step counters) to a device."""
    left = set[torch.device]()
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device != device:
                left.add(value.device)
                state[key] = moved(value, device)
    if left:
        finish_copies(*left, device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on another device. It may still be copied: see `finish_copies`.

    To the CPU it goes through pinned memory, which is copied thirty times as fast as other memory
    (55 against 1.8 GB/s on an H200). Pinning takes far longer than the copy; torch keeps what was
    pinned for the next one, and rounds each tensor up to a power of two. Shards (`DTensor`) are
    copied to other memory.
    """
    if device.type != "cpu" or not tensor.is_cuda or isinstance(tensor, DTensor):
        return tensor.to(device, non_blocking=device.type != "cpu")
    return pinned_like(tensor).copy_(tensor, non_blocking=True)


def pinned_like(tensor: Tensor) -> Tensor:
    """Return a tensor of this shape and type in pinned memory, or, where none can be had, in other
    memory."""
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError as error:  # such as a limit of the host on it
        log.warning("memory cannot be pinned, so copies take longer: %s", error)
        return torch.empty_like(tensor, device="cpu")


def finish_copies(*devices: torch.device) -> None:
    """Return when what was copied from and to these devices has arrived."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def meta_copy(module: nn.Module) -> nn.Module:
    """Return a copy of an unsharded model on the meta device. Tied parameters stay tied."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(module, memo)


def describe(meta_model: nn.Module) -> Model:
    """Return the model's parameters, which are sharded, and buffers, which every rank has whole."""
    return Model(
        tuple(
            Parameter(
                name=name,
                tensors=(GlobalTensor(name, tuple(one.shape), str(one.dtype).split(".")[-1]),),
                sharded=isinstance(one, nn.Parameter),
            )
            for name, one in (*meta_model.named_parameters(), *meta_model.named_buffers())
        )
    )


def select(model: Model, names: frozenset[str]) -> Model:
    """Return the part of a description with these names."""
    return Model(tuple(one for one in model.parameters if one.name in names))


def shards_of(model: nn.Module) -> Shards:
    """Return what this rank holds of a live model's parameters and buffers, not copied."""
    held = {name: local_shard(one).detach() for name, one in model.named_parameters()}
    return held | dict(model.named_buffers())


def build_from_shards(
    meta_model: nn.Module,
    shards: Mapping[str, Tensor],
    world_size: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> nn.Module:
    """Return a model over ``world_size`` ranks (FSDP2) that holds these very shards."""
    model = shard(copy.deepcopy(meta_model), "fsdp2", world_size, device, group)
    put_shards(model, shards)
    return model


def put_shards(model: nn.Module, shards: Mapping[str, Tensor]) -> None:
    """Make these very shards the parameters and buffers of a sharded model, by name."""
    parts = (*model.named_parameters(), *model.named_buffers())
    # By identity, so that a tied parameter is one parameter again.
    new = {id(one): sharded_like(one, shards[name]) for name, one in parts if name in shards}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, one in table.items():
                if id(one) in new:
                    table[name] = new[id(one)]
    # FSDP inspects new parameters after loading, and pads the shards of uneven ones. Left to the
    # first forward pass, it would replace storage of which there are views already.
    model.load_state_dict({}, strict=False)


WEIGHTS = "weights"
"""kind of memory of parameters; moments have their names in the optimizer's state"""
CPU = torch.device("cpu")


def sharded_over(model: Model, ranks: int) -> Layout:
    """Return which of the first ``ranks`` ranks holds what of a model."""
    return layout(model, Strategy(dp=ranks, sharding=FSDP2()), order_of(ranks))


class ShardMemory:
    """Memory for the shards of one rank, whatever the number of active ranks."""

    def __init__(self, meta_model: nn.Module, rank: int) -> None:
        self.meta_model = meta_model
        self.description = describe(meta_model)
        self._rank = rank
        self.reserved = Reservations()

    def allocate(
        self, part: Layout, kind: str, device: torch.device, held: Shards | None = None
    ) -> Shards:
        """Return this rank's shards in a layout, to be filled; those in ``held`` keep their place.

        ``kind``: what the tensors are (weights, a moment), which each have their own memory.
        """
        return allocate(
            part, self._rank, device=device, reserved=self.reserved, kind=kind, held=held
        )

    def allocate_named(
        self, names: Iterable[str], kind: str, ranks: int, device: torch.device
    ) -> Shards:
        """Return shards of the tensors with these names, sharded over ``ranks``."""
        part = select(self.description, frozenset(names))
        return self.allocate(sharded_over(part, ranks), kind, device)


def place_parameters(
    model: nn.Module, memory: ShardMemory, ranks: int, device: torch.device
) -> None:
    """Move the parameters of a newly sharded model to their places. CPU only."""
    if device.type != "cpu":
        return
    held = shards_of(model)
    names = [name for name, _ in memory.meta_model.named_parameters()]
    places = memory.allocate_named(names, WEIGHTS, ranks, device)
    for name, place in places.items():
        place.copy_(held[name])
    put_shards(model, places)


def add_first_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, memory: ShardMemory, ranks: int
) -> None:
    """Make the moments of parameters that are about to be stepped for the first time.

    The optimizer would make them, but not in their places.
    """
    if len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return  # nearly always
    named, state = model.named_parameters(), optimizer.state
    first = {name: one for name, one in named if one.grad is not None and one not in state}
    add_moments(optimizer, first, memory, ranks)


def add_moments(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    memory: ShardMemory | None,
    ranks: int,
) -> None:
    """Give the optimizer zero moments of these parameters, by name, which have none.

    ``memory``: None where the number of ranks cannot change.
    """
    made: dict[str, Shards] = {}
    for kind in MOMENTS if parameters else ():
        if memory is None:
            made[kind] = {n: torch.empty_like(local_shard(p)) for n, p in parameters.items()}
        else:
            device = next(iter(parameters.values())).device
            made[kind] = memory.allocate_named(parameters, kind, ranks, device)
        for one in made[kind].values():
            one.zero_()
    for name, one in parameters.items():
        set_moments(optimizer, one, 0.0, {kind: made[kind][name] for kind in MOMENTS})


class RankShards(NamedTuple):
    """All tensors of which one rank holds a part."""

    weights: Shards
    """parameters and buffers"""
    moments: Mapping[str, Shards]
    """moments by their names in the optimizer's state; empty before the first step"""
    kept: Mapping[str, Shards]
    """shards of `FSDPModelManager.kept`, on the CPU"""


class NewShards:
    """The shards of one rank when ``new`` ranks are active, beside those of ``old`` ranks."""

    def __init__(self, memory: ShardMemory, device: torch.device, old: int, new: int) -> None:
        self._memory, self._device = memory, device
        self._old, self._new = old, new
        self._moves: dict[frozenset[str], tuple[Plan, list[BufferState]]] = {}
        """plans and states by the names of the tensors that move"""
        self.shards = RankShards({}, {}, {})

    def make(self, held: RankShards, stepped: frozenset[str]) -> None:
        """Plan, and allocate.

        Args:
            held: what this rank has now; empty mappings on an idle rank.
            stepped: names of the parameters that have moments.
        """
        description = self._memory.description
        everything = frozenset(one.name for one in description.parameters)
        parameters = self._memory.meta_model.named_parameters()
        trained = frozenset(name for name, one in parameters if one.requires_grad)
        device = self._device
        self.shards = RankShards(
            weights=self._make(WEIGHTS, held.weights, everything, device),
            moments={
                kind: self._make(kind, held.moments.get(kind, {}), stepped, device)
                for kind in (MOMENTS if stepped else ())
            },
            kept={
                name: self._make(f"kept {name}", kept, trained, CPU)
                for name, kept in held.kept.items()
            },
        )

    def fill(
        self, group: dist.ProcessGroup | None, bucket_bytes: int, timeout: timedelta
    ) -> ExchangeReport:
        """Move the old shards in. Collective; raises what `reshard` does."""
        return reshard(
            *self._moves.values(),
            group=group,
            device=self._device,
            bucket_bytes=bucket_bytes,
            timeout=timeout,
        )

    def release(self) -> None:
        """Refer to no shard any more."""
        self._moves.clear()
        self.shards = RankShards({}, {}, {})

    def _make(self, kind: str, held: Shards, names: frozenset[str], device: torch.device) -> Shards:
        """Allocate the new shards of the tensors with these names, and plan how they are filled."""
        if names not in self._moves:
            part = select(self._memory.description, names)
            made = plan(sharded_over(part, self._old), sharded_over(part, self._new))
            self._moves[names] = made, []
        made, states = self._moves[names]
        new = self._memory.allocate(made.new, kind, device, held)
        states.append(BufferState(held, new))
        return new


HOLDERS = (FSDPState, FSDPParamGroup, FSDPParam)


def storages_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Storages:
    """Return the storages of a model and its optimizer; tensors on the meta device have none."""
    tensors = (one for one in _tensors(model, optimizer) if not one.is_meta)
    return Storages(local_shard(one) for one in tensors)


def break_cycles(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make a model and its optimizer useless, so that no reference cycle holds their memory.

    A sharded model and the hooks of FSDP2 are in reference cycles, an optimizer and its schedule
    too: reference counts never reach zero, and a full garbage collection visits every object of the
    process, which takes longer than moving some hundred megabytes.
    """
    optimizer.state.clear()
    optimizer.param_groups.clear()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _empty(module._get_fsdp_state())


def _empty(thing: Any) -> None:
    if isinstance(thing, list):
        for one in thing:
            _empty(one)
    elif isinstance(thing, HOLDERS):
        held = list(vars(thing).values())
        vars(thing).clear()
        _empty(held)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for state in optimizer.state.values():
        yield from (one for one in state.values() if isinstance(one, Tensor))
