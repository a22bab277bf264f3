"""Parallel strategies, the layouts they give, and the plans between layouts. Pure: no torch.

::

    layout(model, strategy) -> who holds which slice of which tensor, and where
    plan(old, new)          -> which box goes from which rank to which

See ``docs/resharding.md``.
"""

from rlinf_async.parallel.groups import Buffer, Layout, Piece, check, layout
from rlinf_async.parallel.plan import BufferRun, BufferView, Plan, RankPlan, in_rounds, plan
from rlinf_async.parallel.sharding import FSDP1, FSDP2, DistributedOptimizer, Replicated, Sharding
from rlinf_async.parallel.splits import (
    ColumnParallel,
    GroupedHeads,
    Heads,
    Joined,
    ModelMismatch,
    NotHeld,
    ParallelError,
    PlanTooLarge,
    RowParallel,
    Split,
    Stacked,
    StrategyError,
    Vocabulary,
    Whole,
)
from rlinf_async.parallel.strategy import (
    DataRank,
    GlobalTensor,
    Model,
    Parameter,
    Strategy,
    check_batch,
    even_layers,
    nested_order,
    valid_dp_sizes,
)

__all__ = [
    "FSDP1",
    "FSDP2",
    "Buffer",
    "BufferRun",
    "BufferView",
    "ColumnParallel",
    "DataRank",
    "DistributedOptimizer",
    "GlobalTensor",
    "GroupedHeads",
    "Heads",
    "Joined",
    "Layout",
    "Model",
    "ModelMismatch",
    "NotHeld",
    "ParallelError",
    "Parameter",
    "Piece",
    "Plan",
    "PlanTooLarge",
    "RankPlan",
    "Replicated",
    "RowParallel",
    "Sharding",
    "Split",
    "Stacked",
    "Strategy",
    "StrategyError",
    "Vocabulary",
    "Whole",
    "check",
    "check_batch",
    "even_layers",
    "in_rounds",
    "layout",
    "nested_order",
    "plan",
    "valid_dp_sizes",
]
