"""Errors of batch resizing.

::

    BatchingError
     +-- BatchSizeError          the sizes do not fit one another (also a ValueError)
     +-- BadBatch                a batch cannot be measured, sliced or joined (also a ValueError)
     +-- SampleTooLong           a single sample exceeds the token limit
     +-- CountsDisagree          the agreed number of micro-batches cannot be made on this rank
     +-- HandlerFailed           a handler raised; its error is the ``__cause__``
     +-- IncompleteBatch         the channel ended in the middle of a step
     +-- UnfinishedGlobalBatch   an operation that is not allowed inside a global batch
     +-- IteratorBusy            two tasks or threads pulled at once
     +-- PullCancelled           a blocking pull was ended by ``close()`` or by its event loop
"""

from __future__ import annotations

from typing import Literal

from rlinf_async.channels.errors import ChannelError


class BatchingError(ChannelError):
    """Base class of the errors of a batch-resizing iterator."""


class BatchSizeError(BatchingError, ValueError):
    """The sizes do not fit one another; the message names sizes that would."""


class BadBatch(BatchingError, ValueError):
    """A batch cannot be measured, sliced or joined with the others."""


class SampleTooLong(BatchingError):
    """One sample has more tokens than a micro-batch may have."""


class CountsDisagree(BatchingError):
    """The agreed number of micro-batches cannot be made from this rank's samples."""


class HandlerFailed(BatchingError):
    """A handler raised. Its batch stays queued: the next pull calls the handler again.

    ``kind`` says which handler, ``index`` which call: received batches and global batches are
    counted from 0 over the iterator's life.
    """

    def __init__(self, kind: Literal["on_batch", "on_global_batch"], index: int, why: str) -> None:
        what = "received batch" if kind == "on_batch" else "global batch"
        super().__init__(
            f"{kind} failed on {what} {index}: {why}. The batch stays queued; pull again to retry."
        )
        self.kind = kind
        self.index = index


class IncompleteBatch(BatchingError):
    """Every sender closed before the step was complete.

    ``missing`` samples would complete the open global batch, ``missing_in_step`` the whole step.
    """

    def __init__(self, *, have: int, size: int, position: int, count: int) -> None:
        self.missing = size - have
        self.missing_in_step = self.missing + (count - position - 1) * size
        super().__init__(
            f"the channel ended with {have} of {size} samples of global batch {position + 1} of "
            f"{count}: {self.missing} missing in the global batch, "
            f"{self.missing_in_step} in the step. Send whole "
            f"steps before the last sender closes, or lower total_batch_size for the last one."
        )


class UnfinishedGlobalBatch(BatchingError):
    """A global batch is open: some of its micro-batches have been yielded, some have not."""


class IteratorBusy(BatchingError):
    """A second task or thread pulled while a first one was waiting."""


class PullCancelled(BatchingError):
    """A blocking pull was ended by ``close()``, or by the end of its event loop.

    Received batches stay queued.
    """
