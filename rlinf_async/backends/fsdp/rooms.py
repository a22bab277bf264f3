"""Room for the shards of a model: when it is built, stepped first or loaded, and, as `Rooms`, for
those of another number of ranks beside the ones there are.

On the CPU a shard has its place by where it is in the whole tensor (`reshard.reserved`), so that
what a rank keeps in a rescale stays where it is. Parameters and moments are put in their places
from the beginning; those that came to lie elsewhere are copied there by the next rescale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlinf_async.backends.fsdp import skeleton
from rlinf_async.backends.fsdp.groups import order_of
from rlinf_async.backends.fsdp.progress import give_moments, moments
from rlinf_async.backends.fsdp.sharding import local_shard
from rlinf_async.backends.fsdp.state import MOMENTS
from rlinf_async.backends.reshard import Report, State, allocate, reshard
from rlinf_async.parallel import FSDP2, Layout, Model, Plan, Strategy, layout, plan

if TYPE_CHECKING:
    from rlinf_async.backends.fsdp.manager import ShardedModelManager
    from rlinf_async.backends.fsdp.optimized import Optimized

Shards = dict[str, Tensor]
WEIGHTS = "weights"
"""what `reserved` calls parameters; moments have their names in the optimizer's state"""


class Rooms:
    """Room on one rank for what it holds when ``new`` ranks are active instead of ``old``."""

    def __init__(self, manager: ShardedModelManager, old: int, new: int) -> None:
        self._manager = manager
        self._old, self._new = old, new
        self._moves: dict[frozenset[str], tuple[Plan, list[State]]] = {}
        """by the names of the tensors that move"""
        self.weights: Shards = {}
        self.moments: dict[str, Shards] = {}
        """by their names in the optimizer's state; empty where no step was made"""
        self.kept: dict[str, Shards] = {}
        """of `ShardedModelManager.kept`"""

    def make(self, stepped: frozenset[str]) -> None:
        """Plan, and make room; ``stepped``: names of the parameters that have moments."""
        manager = self._manager
        whole = skeleton.described(manager.skeleton)
        held = skeleton.shards_of(manager.model) if manager.active else {}
        everything = frozenset(one.name for one in whole.parameters)
        self.weights = self._room(WEIGHTS, whole, held, everything)
        if stepped:
            for key in MOMENTS:
                self.moments[key] = self._room(key, whole, moments(manager, key), stepped)
        for name, kept in manager.kept.items():
            trained = frozenset(name for name, _ in manager.skeleton.named_parameters())
            self.kept[name] = self._room(f"kept {name}", whole, kept, trained, torch.device("cpu"))

    def fill(self, bucket_bytes: int, timeout: timedelta) -> Report:
        """Move the old shards in. Collective; raises what `reshard` does."""
        return reshard(
            *self._moves.values(),
            group=self._manager.groups.transfer,
            device=self._manager.device,
            bucket_bytes=bucket_bytes,
            timeout=timeout,
        )

    def forget(self) -> None:
        """Hold nothing any more."""
        self._moves.clear()
        self.weights, self.moments, self.kept = {}, {}, {}

    def _room(
        self,
        kind: str,
        whole: Model,
        held: Shards,
        names: frozenset[str],
        device: torch.device | None = None,
    ) -> Shards:
        """Make room for the new shards of what this rank holds of these tensors."""
        manager = self._manager
        if names not in self._moves:
            part = skeleton.only(whole, names)
            made = plan(sharded_over(part, self._old), sharded_over(part, self._new))
            self._moves[names] = made, []
        made, states = self._moves[names]
        new = allocate(
            made.new,
            manager.rank,
            device=device or manager.device,
            reserved=manager.reserved,
            kind=kind,
            held=held,
        )
        states.append(State(held, new))
        return new


def settle(member: Optimized) -> None:
    """Put the parameters of a newly sharded model in their places."""
    if member.device.type != "cpu":
        return
    held = skeleton.shards_of(member.model)
    names = [name for name, _ in member.skeleton.named_parameters()]
    places = _places(member, WEIGHTS, names, member.device)
    for name, place in places.items():
        place.copy_(held[name])
    skeleton.put_in(member.model, places)


def first_moments(member: Optimized) -> None:
    """Make the moments of parameters that are about to be stepped for the first time.

    As torch would, which does not ask where.
    """
    optimizer = member.optimizer
    if len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return  # nearly always
    named, state = member.model.named_parameters(), optimizer.state
    new_moments(member, {n: p for n, p in named if p.grad is not None and p not in state})


def new_moments(member: Optimized, parameters: Mapping[str, Tensor]) -> None:
    """Give the optimizer zero moments of these parameters, by name, which have none."""
    made: dict[str, Shards] = {}
    for kind in MOMENTS if parameters else ():
        if member.rescales:
            made[kind] = _places(member, kind, parameters, next(iter(parameters.values())).device)
        else:
            made[kind] = {n: torch.empty_like(local_shard(p)) for n, p in parameters.items()}
        for one in made[kind].values():
            one.zero_()
    for name, one in parameters.items():
        give_moments(member.optimizer, one, 0.0, {kind: made[kind][name] for kind in MOMENTS})


def _places(member: Optimized, kind: str, names: Iterable[str], device: torch.device) -> Shards:
    part = skeleton.only(skeleton.described(member.skeleton), frozenset(names))
    return allocate(
        sharded_over(part, member.world_size),
        member.rank,
        device=device,
        reserved=member.reserved,
        kind=kind,
    )


def sharded_over(model: Model, ranks: int) -> Layout:
    """Return who holds what on the first ranks."""
    return layout(model, Strategy(dp=ranks, sharding=FSDP2()), order_of(ranks))
