"""Batch-resizing iterators: any batches in, exact global and micro-batches out.

``docs/batching.md`` explains the terms.
"""

from rlinf_async.channels.batching.driving import BlockingBatches
from rlinf_async.channels.batching.iterator import (
    Agree,
    BatchResizingIterator,
    BatchSizes,
    Handler,
    alone,
    rank_share,
)
from rlinf_async.channels.batching.operations import (
    BatchOps,
    ColumnOps,
    DictOps,
    ListOps,
    StructOps,
)
from rlinf_async.channels.errors import (
    BadBatch,
    BatchingError,
    BatchSizeError,
    CountsDisagree,
    HandlerFailed,
    IncompleteBatch,
    IteratorBusy,
    PullCancelled,
    SampleTooLong,
    UnfinishedGlobalBatch,
)

__all__ = [
    "Agree",
    "BadBatch",
    "BatchOps",
    "BatchResizingIterator",
    "BatchSizeError",
    "BatchSizes",
    "BatchingError",
    "BlockingBatches",
    "ColumnOps",
    "CountsDisagree",
    "DictOps",
    "Handler",
    "HandlerFailed",
    "IncompleteBatch",
    "IteratorBusy",
    "ListOps",
    "PullCancelled",
    "SampleTooLong",
    "StructOps",
    "UnfinishedGlobalBatch",
    "alone",
    "rank_share",
]
