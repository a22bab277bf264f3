"""Errors of workers, by what the caller can do about them.

::

    BuildError              the worker graph is wrong: nothing was started (also a ValueError)
    WorkerError             a call failed inside a worker: worker, rank, host, method, traceback
     +-- WorkerDied         the worker's process ended by itself: exit code or signal
          +-- WorkerUnresponsive   it, or an environment in it, stopped answering, and it was killed
    Deadlock                every worker waits for another: who, on which channel, how long
"""

from __future__ import annotations

import traceback
from typing import Final, Self

import msgspec

from rlinf_async.channels.errors import fit_bytes, text_of

MAX_MESSAGE_BYTES: Final = 20_000
MAX_TRACEBACK_BYTES: Final = 60_000
"""Together they fit in the reply to a call, however long the exception's text is."""


class BuildError(ValueError):
    """The worker graph is wrong. Raised before anything is started; names both sides."""


class Deadlock(RuntimeError):
    """Every worker waits for another: none can go on."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception in a worker, as plain data that can cross to another process."""

    worker: str
    host: str
    pid: int
    method: str
    error_type: str
    message: str
    traceback: str
    channel_error: bool = False
    """whether it only passes on, through a channel, what happened elsewhere: see `is_secondary`"""
    explained: bool = False
    """whether the message says all (a full disk, a file that this host does not have), and the
    traceback adds nothing"""
    waited: float = 0.0
    """seconds for which it was waited until the process was found to hang, where it was killed"""


def is_secondary(error: BaseException) -> bool:
    """Whether an error only passes on, through a channel, what happened elsewhere.

    The refusal of an item (wrong type, too large) is an error of its own.
    """
    from rlinf_async.channels import ChannelError, ItemTooLarge, MalformedFrame, WrongItemType

    if isinstance(error, BaseExceptionGroup):
        return all(is_secondary(one) for one in error.exceptions)
    if isinstance(error, WorkerError):
        return error.failure.channel_error
    return isinstance(error, ChannelError) and not isinstance(
        error, (WrongItemType, ItemTooLarge, MalformedFrame)
    )


class WorkerError(RuntimeError):
    """A call failed inside a worker.

    In one process the original exception is the ``__cause__``; from another process its type,
    message and traceback are in ``failure``.
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(
            f"{failure.worker} failed in {failure.method} "
            f"(process {failure.pid} on {failure.host}): {failure.error_type}: {failure.message}"
            + (f"\n\n{failure.traceback.rstrip()}" if failure.traceback else "")
        )

    @property
    def worker(self) -> str:
        """Group and rank: ``"Rollout[1]"``."""
        return self.failure.worker

    @property
    def summary(self) -> str:
        """The first line: worker, method, process, error."""
        return str(self).split("\n", 1)[0]

    @classmethod
    def of(cls, error: BaseException, *, worker: str, host: str, pid: int, method: str) -> Self:
        """Wrap an exception. Of a very long text the beginning and the end are kept."""
        from rlinf_async.config import UsageError
        from rlinf_async.observe.errors import RunFolderError

        return cls(
            Failure(
                worker=worker,
                host=host,
                pid=pid,
                method=method,
                error_type=type(error).__name__,
                message=fit_bytes(text_of(error), MAX_MESSAGE_BYTES),
                traceback=fit_bytes(
                    "".join(traceback.format_exception(error)), MAX_TRACEBACK_BYTES
                ),
                channel_error=is_secondary(error),
                explained=isinstance(error, (RunFolderError, UsageError)),
            )
        )


class WorkerDied(WorkerError):
    """The worker's process ended by itself."""


class WorkerUnresponsive(WorkerDied):
    """The worker was killed: its event loop, or an environment, did not answer within the limit."""
