"""The first stage: from the receiver, through ``on_batch``, into a queue of samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Literal, TypeVar

from rlinf_async.channels.batching.driving import Calls, Wait
from rlinf_async.channels.batching.errors import HandlerFailed, PullCancelled
from rlinf_async.channels.batching.operations import BatchOps
from rlinf_async.channels.batching.samples import SampleQueue
from rlinf_async.channels.ends import Key, Receiver

B = TypeVar("B")

Handler = Callable[[B], B | Awaitable[B]]
"""Takes a batch and returns its replacement. Called again with the same batch after an error, not
after a cancelled pull."""


class Intake(Generic[B]):
    """Receives batches until enough samples are queued."""

    def __init__(
        self,
        receiver: Receiver[B],
        ops: BatchOps[B],
        on_batch: Handler[B] | None,
        key: Key | None,
    ) -> None:
        self._receiver = receiver
        self._ops = ops
        self._on_batch = on_batch
        self._key = key
        self._inbox: deque[B] = deque()
        """received batches that are not handled yet"""
        self._received = 0
        """number of handled batches"""
        self.calls = Calls()
        """of all handlers of the iterator"""
        self.samples = SampleQueue(ops)
        self.empty_batches = 0

    async def fill(self, count: int, wait: Wait) -> None:
        """Receive until ``count`` samples are queued; raises what the receiver raises."""
        while len(self.samples) < count:
            if not self._inbox:
                await wait(self._get())
            await self._handle(self._inbox[0], wait)
            self._inbox.popleft()
            self._received += 1

    async def _get(self) -> None:
        # One step on the loop: after a cancelled pull the batch is in the inbox.
        self._inbox.append(await self._receiver.get(key=self._key))

    async def _handle(self, batch: B, wait: Wait) -> None:
        if self._ops.size(batch) == 0:
            self.empty_batches += 1
            return
        if self._on_batch is not None:
            batch = await call(self._on_batch, batch, "on_batch", self._received, self.calls, wait)
        self.samples.append(batch)


async def call(
    handler: Handler[B],
    batch: B,
    kind: Literal["on_batch", "on_global_batch"],
    index: int,
    calls: Calls,
    wait: Wait,
) -> B:
    """The handler's result for the batch; raises `HandlerFailed` with its error as the cause."""
    try:
        handled = await calls.result((kind, index), lambda: handler(batch), wait)
    except PullCancelled:
        raise
    except Exception as error:
        raise HandlerFailed(kind, index, f"{type(error).__name__}: {error}") from error
    if handled is None:
        raise HandlerFailed(kind, index, "it returned None; return the batch")
    return handled
