"""The process groups of a strategy: which ranks do what together.

Megatron's own `initialize_model_parallel` always takes all ranks of the process. Here the ranks
that a strategy does not use are idle members, and the groups can be made again for another strategy
while the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from rlinf_async.backends.megatron.library import of_megatron
from rlinf_async.parallel import Strategy


class Place(NamedTuple):
    """Where a rank stands in the grid of a strategy."""

    tp: int
    dp: int
    stage: int


class Grid(NamedTuple):
    """The process groups of one strategy, as this rank sees them."""

    strategy: Strategy
    place: Place | None
    """None: this rank is idle"""
    groups: Any
    """Megatron's ``ProcessGroupCollection``; None on an idle rank"""
    data: dist.ProcessGroup | None
    """the ranks that train on other samples with the same part of the model"""
    model: dist.ProcessGroup | None
    """the ranks that train on the same samples; their first one reads the channels"""
    feed: dist.ProcessGroup | None
    """the same ranks, over gloo, for what is no tensor: its messages never meet those of stages"""

    @property
    def is_io(self) -> bool:
        """Whether this rank reads and writes channels for its model-parallel group."""
        return self.place is not None and (self.place.tp, self.place.stage) == (0, 0)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes log-probs and losses."""
        return self.place is not None and self.place.stage == self.strategy.pp - 1


def place_of(rank: int, strategy: Strategy) -> Place | None:
    """Return where a rank stands; None where the strategy does not use it."""
    if rank >= strategy.world_size:
        return None
    tp, rest = rank % strategy.tp, rank // strategy.tp
    return Place(tp, rest % strategy.dp, rest // strategy.dp)


def make_grid(strategy: Strategy) -> Grid:
    """Make the groups of a strategy without context and expert parallelism.

    Collective over all launched ranks: each makes all groups, in the same order.
    """
    rank, size = dist.get_rank(), strategy.world_size
    place = place_of(rank, strategy)
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group(members: Iterable[Sequence[int]]) -> dist.ProcessGroup | None:
        """Make these groups; return the one with this rank."""
        own = None
        for ranks in members:
            key = tuple(ranks)
            if key not in made:
                created: Any = dist.new_group(list(key))
                made[key] = created
            if rank in key:
                own = made[key]
        return own

    tp, dp, pp = range(strategy.tp), range(strategy.dp), range(strategy.pp)

    def at(tensor: int, data: int, stage: int) -> int:
        return tensor + strategy.tp * (data + strategy.dp * stage)

    tensor = group([at(t, d, s) for t in tp] for s in pp for d in dp)
    data = group([at(t, d, s) for d in dp] for s in pp for t in tp)
    pipeline = group([at(t, d, s) for s in pp] for d in dp for t in tp)
    model = group([at(t, d, s) for s in pp for t in tp] for d in dp)
    feed = None
    for d in dp:
        members = [at(t, d, s) for s in pp for t in tp]
        if len(members) > 1:
            created: Any = dist.new_group(members, backend="gloo")
            feed = created if rank in members else feed
    ends = group(
        sorted({at(t, d, 0), at(t, d, strategy.pp - 1)}) for d in dp for t in tp
    )  # fmt: skip
    first = group([at(t, d, 0)] for d in dp for t in tp)
    with_data = group([at(t, d, s) for d in dp for t in tp] for s in pp)
    alone = group([one] for one in range(size))
    everyone = group([list(range(size))])
    if place is None:
        return Grid(strategy, None, None, None, None, None)
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
    return Grid(strategy, place, groups, data, model, feed)
