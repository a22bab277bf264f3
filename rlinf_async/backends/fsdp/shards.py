"""Memory for the shards of one rank: of a new model, of the optimizer's first step, of a rescale.

On the CPU a shard has its place by where it is in the whole tensor (`reshard.reserved`), so that
what a rank keeps in a rescale stays where it is. Parameters and moments are put in their places
from the beginning; those that came to lie elsewhere are copied there by the next rescale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_async.backends.fsdp.groups import order_of
from rlinf_async.backends.fsdp.meta_model import describe, put_shards, select, shards_of
from rlinf_async.backends.fsdp.sharding import Shards, local_shard
from rlinf_async.backends.fsdp.state import MOMENTS, set_moments
from rlinf_async.backends.reshard import Report, Reservations, State, allocate, reshard
from rlinf_async.parallel import FSDP2, Layout, Model, Plan, Strategy, layout, plan

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
        self._reserved = Reservations()

    def allocate(
        self, part: Layout, kind: str, device: torch.device, held: Shards | None = None
    ) -> Shards:
        """Return this rank's shards in a layout, to be filled; those in ``held`` keep their place.

        ``kind``: what the tensors are (weights, a moment), which each have their own memory.
        """
        return allocate(
            part, self._rank, device=device, reserved=self._reserved, kind=kind, held=held
        )

    def allocate_named(
        self, names: Iterable[str], kind: str, ranks: int, device: torch.device
    ) -> Shards:
        """Return shards of the tensors with these names, sharded over ``ranks``."""
        part = select(self.description, frozenset(names))
        return self.allocate(sharded_over(part, ranks), kind, device)

    def give_back(self) -> None:
        """Free all of it, as soon as no tensor uses it."""
        self._reserved.give_back()


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
    """by their names in the optimizer's state; empty before the first step"""
    kept: Mapping[str, Shards]
    """of `FSDPModelManager.kept`, on the CPU"""


class NewShards:
    """The shards of one rank when ``new`` ranks are active, beside those of ``old`` ranks."""

    def __init__(self, memory: ShardMemory, device: torch.device, old: int, new: int) -> None:
        self._memory, self._device = memory, device
        self._old, self._new = old, new
        self._moves: dict[frozenset[str], tuple[Plan, list[State]]] = {}
        """by the names of the tensors that move"""
        self.shards = RankShards({}, {}, {})

    def make(self, held: RankShards, stepped: frozenset[str]) -> None:
        """Plan, and allocate.

        Args:
            held: what this rank has now; empty mappings on an idle rank.
            stepped: names of the parameters that have moments.
        """
        description = self._memory.description
        everything = frozenset(one.name for one in description.parameters)
        trained = frozenset(name for name, _ in self._memory.meta_model.named_parameters())
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
    ) -> Report:
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
        states.append(State(held, new))
        return new
