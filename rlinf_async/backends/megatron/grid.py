"""The process groups of a strategy: which ranks do what together.

Megatron's own `initialize_model_parallel` always takes all ranks of the process. Here the ranks
that a strategy does not use are idle members, and the groups can be made again for another strategy
while the run goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, default_pg_timeout

from rlinf_async.backends.megatron.cpu import of_megatron
from rlinf_async.backends.rescale.rescale import TransferGroup
from rlinf_async.parallel import Strategy

AFTER_A_FAILURE = timedelta(seconds=0.1)
"""limit of the other groups once one could not be made: they are only counted then"""


class Key(NamedTuple):
    """Identity of a process group."""

    ranks: tuple[int, ...]
    objects: bool = False
    """whether messages are objects, over gloo, which never meet those of stages; else tensors"""


class GridGroups:
    """The process groups of one rank, whatever the strategy: each set of ranks has one, made once.

    Every launched rank makes every group, at the same place of the program, also those it is not
    in: torch counts them. They are kept, because making one costs connections, and the groups of a
    strategy that was rolled back are there for the next attempt.
    """

    def __init__(self) -> None:
        self._made: dict[Key, dist.ProcessGroup] = {}
        self.transfer = TransferGroup()

    @property
    def known(self) -> list[Key]:
        """The groups that this rank has made."""
        return list(self._made)

    def make(
        self,
        keys: Iterable[Key],
        known: Collection[Key] = (),
        limit: timedelta = default_pg_timeout,
    ) -> None:
        """Make groups. Collective over all launched ranks.

        Args:
            keys: keys of groups, in the same order on all ranks.
            known: groups that every rank has.
            limit: how long one may take.

        Raises the `RuntimeError` of torch when a rank cannot be reached, after all were asked for;
        another attempt may be made.
        """
        failed: RuntimeError | None = None
        for key in dict.fromkeys(keys):
            if key in known:
                continue
            options: dict[str, Any] = {"backend": "gloo"} if key.objects else {}
            limit = limit if failed is None else AFTER_A_FAILURE
            try:
                made: Any = dist.new_group(list(key.ranks), timeout=limit, **options)
            except RuntimeError as error:
                failed = failed or error
                self._made.pop(key, None)
                continue
            self._made[key] = made
            if limit != default_pg_timeout and dist.get_rank() in key.ranks:
                _set_pg_timeout(default_pg_timeout, made)
        if failed is not None:
            raise failed

    def of(self, key: Key) -> dist.ProcessGroup:
        """Return a group that was made."""
        return self._made[key]


class GridPlace(NamedTuple):
    """Place of a rank in the grid of a strategy."""

    tp: int
    dp: int
    stage: int


class Grid(NamedTuple):
    """The process groups of one strategy, as this rank sees them."""

    strategy: Strategy
    place: GridPlace | None
    """place of this rank in the grid; None: it is idle"""
    groups: Any
    """Megatron's ``ProcessGroupCollection``; None on an idle rank"""
    data: dist.ProcessGroup | None
    """the ranks that train on other samples with the same part of the model"""
    model: dist.ProcessGroup | None
    """the ranks that train on the same samples; their first one reads the channels"""
    feed: dist.ProcessGroup | None
    """ranks of this rank's model, over gloo, for what is no tensor: messages never meet those of
    stages"""
    readers: dist.ProcessGroup | None
    """the ranks that read the channels, over gloo; None on others"""

    @property
    def is_io(self) -> bool:
        """Whether this rank reads and writes channels for its model-parallel group."""
        return self.place is not None and (self.place.tp, self.place.stage) == (0, 0)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes log-probs and losses."""
        return self.place is not None and self.place.stage == self.strategy.pp - 1


def place_of(rank: int, strategy: Strategy) -> GridPlace | None:
    """Return where a rank stands; None where the strategy does not use it."""
    if rank >= strategy.world_size:
        return None
    tp, rest = rank % strategy.tp, rank // strategy.tp
    return GridPlace(tp, rest % strategy.dp, rest // strategy.dp)


def keys_of(strategy: Strategy) -> dict[str, list[Key]]:
    """Return the groups of a strategy, by what their ranks do together."""
    tp, dp, pp = range(strategy.tp), range(strategy.dp), range(strategy.pp)

    def at(tensor: int, data: int, stage: int) -> int:
        return tensor + strategy.tp * (data + strategy.dp * stage)

    def keys(members: Iterable[Iterable[int]]) -> list[Key]:
        return [Key(tuple(ranks)) for ranks in members]

    models = [[at(t, d, s) for s in pp for t in tp] for d in dp]
    return {
        "tensor": keys((at(t, d, s) for t in tp) for s in pp for d in dp),
        "data": keys((at(t, d, s) for d in dp) for s in pp for t in tp),
        "pipeline": keys((at(t, d, s) for s in pp) for d in dp for t in tp),
        "model": keys(models),
        "feed": [Key(tuple(ranks), objects=True) for ranks in models if len(ranks) > 1],
        "readers": [Key(tuple(at(0, d, 0) for d in dp), objects=True)] if len(dp) > 1 else [],
        "ends": keys(sorted({at(t, d, 0), at(t, d, strategy.pp - 1)}) for d in dp for t in tp),
        "first": keys([at(t, d, 0)] for d in dp for t in tp),
        "with data": keys((at(t, d, s) for d in dp for t in tp) for s in pp),
        "alone": keys([one] for one in range(strategy.world_size)),
        "everyone": keys([range(strategy.world_size)]),
    }


def make_grid(
    strategy: Strategy,
    groups: GridGroups | None = None,
    known: Collection[Key] = (),
    limit: timedelta = default_pg_timeout,
) -> Grid:
    """Make the groups of a strategy without context and expert parallelism.

    Collective over all launched ranks: each makes all groups, in the same order; but not those of
    ``groups`` that are ``known`` to all. Raises what `GridGroups.make` does.
    """
    made = groups or GridGroups()
    rank = dist.get_rank()
    place = place_of(rank, strategy)
    by_role = keys_of(strategy)
    made.make([key for keys in by_role.values() for key in keys], known, limit)

    def own(role: str) -> dist.ProcessGroup | None:
        found = [key for key in by_role[role] if rank in key.ranks]
        return made.of(found[0]) if found else None

    if place is None:
        return Grid(strategy, None, None, None, None, None, None)
    tensor, data, pipeline, model = map(own, ("tensor", "data", "pipeline", "model"))
    ends, first, with_data, alone = map(own, ("ends", "first", "with data", "alone"))
    everyone, feed, readers = map(own, ("everyone", "feed", "readers"))
    collection = of_megatron("process_groups_config").ProcessGroupCollection
    groups = collection(
        tp=tensor,
        pp=pipeline,
        mp=model,
        embd=ends if place.stage in (0, strategy.pp - 1) else None,
        pos_embd=first if place.stage == 0 else None,
        cp=alone,
        tp_cp=tensor,
        hcp=None,
        ep=alone,
        expt_tp=tensor,
        tp_ep=tensor,
        tp_ep_pp=model,
        dp=data,
        dp_cp=data,
        intra_dp_cp=data,
        expt_dp=data,
        intra_expt_dp=data,
        tp_dp_cp=with_data,
        inter_dist_opt=None,
        intra_dist_opt=everyone,
    )
    return Grid(strategy, place, groups, data, model, feed, readers)
