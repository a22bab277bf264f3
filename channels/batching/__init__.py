"""Batch-resizing iterators: any batches in, exact global and micro-batches out.

``docs/batching.md`` explains the terms.
"""

from rlinf_async.channels.batching.blocking import BlockingBatches
from rlinf_async.channels.batching.columns import ColumnOps, DictOps, StructOps
from rlinf_async.channels.batching.cutter import Agree, alone
from rlinf_async.channels.batching.errors import (
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
from rlinf_async.channels.batching.intake import Handler
from rlinf_async.channels.batching.iterator import BatchResizingIterator
from rlinf_async.channels.batching.operations import BatchOps, ListOps
from rlinf_async.channels.batching.sizes import BatchSizes, rank_share

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
