"""`Rooms`: the new shards of a model whose number of ranks changes, beside the old ones."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlinf_async.backends.fsdp import skeleton
from rlinf_async.backends.fsdp.groups import order_of
from rlinf_async.backends.fsdp.progress import moments
from rlinf_async.backends.fsdp.state import MOMENTS
from rlinf_async.backends.reshard import Report, State, allocate, reshard
from rlinf_async.parallel import FSDP2, Layout, Model, Plan, Strategy, layout, plan

if TYPE_CHECKING:
    from rlinf_async.backends.fsdp.manager import ShardedModelManager

Shards = dict[str, Tensor]


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
        self.weights = self._room(whole, held, frozenset(one.name for one in whole.parameters))
        if stepped:
            for key in MOMENTS:
                self.moments[key] = self._room(whole, moments(manager, key), stepped)
        for name, kept in manager.kept.items():
            trained = frozenset(name for name, _ in manager.skeleton.named_parameters())
            self.kept[name] = self._room(whole, kept, trained, torch.device("cpu"))

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
        new = allocate(made.new, manager.rank, device=device or manager.device)
        states.append(State(held, new))
        return new


def sharded_over(model: Model, ranks: int) -> Layout:
    """Return who holds what on the first ranks."""
    return layout(model, Strategy(dp=ranks, sharding=FSDP2()), order_of(ranks))
