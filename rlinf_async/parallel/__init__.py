"""Parallel strategies, the layouts they give, and the plans between layouts. Pure: no torch.

::

    layout(model, strategy) -> who holds which slice of which tensor, and where
    plan(old, new)          -> which box goes from which rank to which

See ``docs/resharding.md``.
"""

from rlinf_async.parallel.data_rank import DataRank
from rlinf_async.parallel.errors import (
    ModelMismatch,
    NotHeld,
    ParallelError,
    PlanTooLarge,
    StrategyError,
)
from rlinf_async.parallel.layout import Buffer, Layout, Piece, check, layout
from rlinf_async.parallel.nested import nested_order
from rlinf_async.parallel.plan import Plan, RankPlan, Run, View
from rlinf_async.parallel.planning import plan
from rlinf_async.parallel.rounds import in_rounds
from rlinf_async.parallel.sharding import FSDP1, FSDP2, DistributedOptimizer, Replicated, Sharding
from rlinf_async.parallel.splits import (
    Column,
    GroupedHeads,
    Heads,
    Joined,
    Row,
    Split,
    Stacked,
    Vocabulary,
    Whole,
)
from rlinf_async.parallel.strategy import Strategy, check_batch, even_layers, valid_dp_sizes
from rlinf_async.parallel.tensors import GlobalTensor, Model, Parameter

__all__ = [
    "FSDP1",
    "FSDP2",
    "Buffer",
    "Column",
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
    "Row",
    "Run",
    "Sharding",
    "Split",
    "Stacked",
    "Strategy",
    "StrategyError",
    "View",
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
