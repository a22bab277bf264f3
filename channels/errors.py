"""Errors of channels and of batch resizing, by what the caller can do about them.

::

    ChannelError
     +-- EndOfChannel      every sender has closed and nothing is left: the normal end
     +-- ChannelClosed     this end was closed (here, by you) and then used again
     +-- NoReceivers       every receiver has closed: nobody will ever take this item
     +-- ChannelFailed     somebody called ``fail(error)``; the cause is chained and named
     +-- ChannelEmpty      a ``_nowait`` get found nothing
     +-- ChannelFull       a ``_nowait`` put found no room
     +-- WrongItemType     the item is not of the channel's type (also a TypeError)
     +-- LeaseLost         the lease was taken back before it was acknowledged
     +-- WireError         the connection to the channel's owner
          +-- ConnectionLost      it was cut
               +-- HomeLost            with the worker that the channel's queue lived with
          +-- HandshakeFailed     wrong secret, or another protocol version
          +-- MalformedFrame      what arrived is not a frame of this protocol
          +-- ItemTooLarge        the encoded item is over the frame limit

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

import itertools
from collections.abc import Mapping
from typing import Final, Literal


class ChannelError(Exception):
    """Root of everything that a channel raises."""


class EndOfChannel(ChannelError):
    """Every sender has closed and every item has been taken."""


class ChannelClosed(ChannelError):
    """An end was closed and then used again."""


class NoReceivers(ChannelError):
    """Every receiver has closed: the item would never be taken."""


class ChannelFailed(ChannelError):
    """The channel was failed with an error, which is the ``__cause__`` where it is known here."""


class ChannelEmpty(ChannelError):
    """A ``_nowait`` get found no item."""


class ChannelFull(ChannelError):
    """A ``_nowait`` put found no room."""


class WrongItemType(ChannelError, TypeError):
    """The item is not of the channel's type."""


class LeaseLost(ChannelError):
    """The leased items went back to the channel before they were acknowledged."""


class WireError(ChannelError):
    """Something is wrong with the connection to the process that owns the channel."""


class ConnectionLost(WireError):
    """The connection was cut."""


class HomeLost(ConnectionLost):
    """The worker that the channel's queue lived with is gone, or out of reach; what was queued is
    lost with it."""


class HandshakeFailed(WireError):
    """The peer could not prove the cluster's secret, or speaks another protocol version."""


class MalformedFrame(WireError):
    """What arrived is not a frame of this protocol, or not of the expected type."""


class ItemTooLarge(WireError):
    """The encoded item is larger than a frame may be."""


# ---- why a channel takes or gives no more items. Made anew for each caller that is told.

Failure = tuple[str, BaseException | None]
"""The text with which a channel was failed, and the error itself where it was raised here."""


def channel_failed(name: str, failure: Failure) -> ChannelFailed:
    text, cause = failure
    error = ChannelFailed(f"channel {name!r} failed: {text}")
    error.__cause__ = cause
    return error


def channel_closed(name: str) -> ChannelClosed:
    return ChannelClosed(f"channel {name!r} was closed: nothing can be put any more")


def closed_while_waiting(name: str) -> ChannelClosed:
    return ChannelClosed(f"this end of channel {name!r} was closed while it waited")


def channel_ended(
    name: str, key: int | str | None = None, elsewhere: Mapping[int | str | None, int] | None = None
) -> EndOfChannel:
    """``elsewhere``: numbers of items under other keys than the one that was asked for."""
    text = f"channel {name!r} has ended: every sender closed, nothing left"
    if key is not None:
        text += f" under the key {key!r}"
    if elsewhere:
        some = [
            f"{count} {'without a key' if other is None else f'under {other!r}'}"
            for other, count in itertools.islice(elsewhere.items(), 4)
        ]
        text += f" (but {', '.join(some)}{', ...' if len(some) < len(elsewhere) else ''})"
    return EndOfChannel(text)


def no_receivers(name: str) -> NoReceivers:
    return NoReceivers(f"channel {name!r} has no receiver left: every consumer has closed its end")


# ---- errors as text

MAX_TEXT: Final = 4_000
"""most characters of a text; a longer one ends with the number of those left out"""


def error_text(error: BaseException | str) -> str:
    """An error's type and text: at most `MAX_TEXT` characters of valid UTF-8."""
    return fit(error if isinstance(error, str) else f"{type(error).__name__}: {text_of(error)}")


def text_of(error: BaseException) -> str:
    """``str(error)``, or the reason why it could not be made."""
    try:
        return str(error)
    except Exception as broken:
        return f"<no text: its __str__ raised {type(broken).__name__}>"


def fit(text: str, limit: int = MAX_TEXT) -> str:
    """The text, cut to ``limit`` characters; what is not valid UTF-8 is escaped."""
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text) - limit} more characters)"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def fit_bytes(text: str, limit: int) -> str:
    """The text in at most ``limit`` bytes of UTF-8: of a longer one, its beginning and its end."""
    said = text.encode("utf-8", "backslashreplace")
    if len(said) > limit:
        gap = f" ... ({len(said)} bytes in all) ... ".encode()
        half = (limit - len(gap)) // 2
        said = said[:half] + gap + said[-half:]
    return said.decode("utf-8", "ignore")  # a character may have been cut through


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
