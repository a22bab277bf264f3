"""Resizes received batches of any size to the micro-batches that a trainer needs.

::

    receiver --> inbox --on_batch--> samples --on_global_batch--> windows --cut--> ready --> caller
                 (as received)       (a queue)  (or no handler)   (gathered)       (micro-batches)

How many samples are collected before the first micro-batch is yielded:

===============================  ==============================================================
fixed ``micro_batch_size``       one micro-batch: training overlaps with arrival
``max_tokens_per_micro_batch``   one window: ``balance_window`` samples (training overlaps), or
                                 the global batch without ``balance_window``
with ``on_global_batch``         the **whole global batch**, in either mode: the handler must see
                                 all of it
===============================  ==============================================================

Invariants: every sample is yielded exactly once. The boundaries of the received batches make no
difference. A stage removes a batch only once the next stage has the batch, so a cancellation or an
error anywhere loses nothing and the next pull continues there. A handler, or ``agree``, whose pull
is cancelled goes on, and the next pull takes its result: each is called once for what it handles.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Literal, Self, TypeVar

import msgspec

from rlinf_async.channels.batching.driving import BlockingBatches, Calls, Wait, wait_here
from rlinf_async.channels.batching.operations import BatchOps, join, sample_lengths, select
from rlinf_async.channels.ends import Key, Receiver
from rlinf_async.channels.errors import (
    BadBatch,
    BatchingError,
    BatchSizeError,
    CountsDisagree,
    EndOfChannel,
    HandlerFailed,
    IncompleteBatch,
    IteratorBusy,
    PullCancelled,
    SampleTooLong,
    UnfinishedGlobalBatch,
)


class BatchSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of one data-parallel rank, in samples of that rank. Exactly one of the two
    micro-batch limits is given; ``docs/batching.md`` has a worked example. ::

        step            total_batch_size samples on this rank
         = num_global_batches x global batch      one optimizer step each
            = windows                             cut into micro-batches together
               = micro-batches                    one forward and backward each

    Raises `BatchSizeError` when made from sizes that do not divide one another.
    """

    total_batch_size: int
    """samples of one step on this rank"""
    num_global_batches: int = 1
    """optimizer steps of one step"""
    micro_batch_size: int | None = None
    """samples of every micro-batch"""
    max_tokens_per_micro_batch: int | None = None
    """largest number of tokens in a micro-batch; its number of samples then varies"""
    balance_window: int | None = None
    """samples over which token-limited micro-batches are balanced; the global batch by default"""

    def __post_init__(self) -> None:
        self._check_positive()
        self._check_mode()
        self._check_division()

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step on this rank."""
        return self.total_batch_size // self.num_global_batches

    @property
    def window_size(self) -> int:
        """Samples that are cut into micro-batches together."""
        return self.micro_batch_size or self.balance_window or self.global_batch_size

    def with_total(self, total_batch_size: int) -> BatchSizes:
        """Return these sizes for another share of the step; raises `BatchSizeError`."""
        return msgspec.structs.replace(self, total_batch_size=total_batch_size)

    def _check_positive(self) -> None:
        for name in self.__struct_fields__:
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise BatchSizeError(f"{name} must be at least 1, got {value}")

    def _check_mode(self) -> None:
        if (self.micro_batch_size is None) == (self.max_tokens_per_micro_batch is None):
            given = "neither was" if self.micro_batch_size is None else "both were"
            raise BatchSizeError(
                f"give either micro_batch_size or max_tokens_per_micro_batch: {given} given"
            )
        if self.balance_window is not None and self.micro_batch_size is not None:
            raise BatchSizeError(
                f"balance_window={self.balance_window} goes with max_tokens_per_micro_batch; "
                f"micro-batches of a fixed size ({self.micro_batch_size}) are not balanced"
            )

    def _check_division(self) -> None:
        total, count = self.total_batch_size, self.num_global_batches
        if total % count:
            raise BatchSizeError(
                f"num_global_batches={count} does not divide total_batch_size={total} (samples of "
                f"one rank): {total} divides into {_divisors(total)}"
            )
        for name in ("micro_batch_size", "balance_window"):
            part: int | None = getattr(self, name)
            if part is not None and self.global_batch_size % part:
                raise BatchSizeError(
                    f"{name}={part} does not divide the global batch of {self.global_batch_size} "
                    f"samples on one rank (total_batch_size={total} / num_global_batches={count}): "
                    f"these would: {_divisors(self.global_batch_size)}"
                )


def rank_share(total_batch_size: int, ranks: int, *, group_size: int = 1) -> int:
    """Samples of a step for each data-parallel rank, with whole groups of ``group_size``.

    Raises `BatchSizeError` when ``ranks * group_size`` does not divide the total.
    """
    if ranks < 1 or group_size < 1:
        raise BatchSizeError(f"ranks={ranks} and group_size={group_size} must be at least 1")
    if total_batch_size < 1 or total_batch_size % (ranks * group_size):
        fitting = max(1, round(total_batch_size / (ranks * group_size))) * ranks * group_size
        raise BatchSizeError(
            f"total_batch_size={total_batch_size} does not divide over {ranks} ranks in groups of "
            f"{group_size} ({ranks} x {group_size} = {ranks * group_size}): {fitting} would"
        )
    return total_batch_size // ranks


def _divisors(number: int) -> str:
    divisors = [part for part in range(1, number + 1) if number % part == 0]
    if len(divisors) > 12:
        return ", ".join(map(str, divisors[:6])) + ", ..., " + ", ".join(map(str, divisors[-6:]))
    return ", ".join(map(str, divisors))


def balance(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Indices of the samples of each of ``count`` micro-batches, with about as many tokens in each.

    Longest-first list scheduling: samples are assigned, longest first, to the micro-batch with the
    fewest tokens (Graham 1969, "Bounds on multiprocessing timing anomalies": the largest part is at
    most 4/3 of the best possible). Two properties that the iterator relies on:

    - no part is empty, as long as there are at least as many samples as parts;
    - one part more never makes the largest part larger, so a count that was raised to agree with
      other ranks still keeps to the token limit. (By induction over the samples: with loads sorted
      downwards, the i-th of k + 1 parts is at most the i-th of k parts.)

    Samples keep their order inside a micro-batch; micro-batches are in the order of their first
    samples. Raises `CountsDisagree` when there are fewer samples than micro-batches.
    """
    if not 1 <= count <= len(lengths):
        raise CountsDisagree(
            f"{len(lengths)} samples cannot make {count} micro-batches without an empty one. "
            f"Every rank must have equally many samples per window; a larger balance_window or "
            f"max_tokens_per_micro_batch makes it less likely."
        )
    parts: list[list[int]] = [[] for _ in range(count)]
    # The number of samples breaks ties: samples of no tokens fill empty parts first.
    heap = [(0, 0, part) for part in range(count)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        tokens, samples, part = heap[0]
        parts[part].append(index)
        heapq.heapreplace(heap, (tokens + lengths[index], samples + 1, part))
    return sorted(sorted(part) for part in parts)


def fewest_micro_batches(lengths: Sequence[int], max_tokens: int) -> int:
    """The smallest count for which `balance` keeps every micro-batch within ``max_tokens``.

    Raises `SampleTooLong` when a single sample exceeds ``max_tokens``.
    """
    longest = max(range(len(lengths)), key=lambda index: lengths[index])
    if lengths[longest] > max_tokens:
        raise SampleTooLong(
            f"sample {longest} of the window has {lengths[longest]} tokens, over the "
            f"{max_tokens} of max_tokens_per_micro_batch. Set it to at least the longest sequence "
            f"that can occur, or shorten sequences in on_batch."
        )
    low, high = max(1, -(-sum(lengths) // max_tokens)), len(lengths)
    while low < high:
        middle = (low + high) // 2
        if _largest_part(lengths, middle) <= max_tokens:
            high = middle
        else:
            low = middle + 1
    return low


def _largest_part(lengths: Sequence[int], count: int) -> int:
    return max(sum(lengths[index] for index in part) for part in balance(lengths, count))


B = TypeVar("B")

Agree = Callable[[int], int | Awaitable[int]]
"""Returns the maximum of the counts of all data-parallel ranks: an all-reduce with MAX."""


def alone(count: int) -> int:
    """`Agree` of a single rank."""
    return count


class Cutter(Generic[B]):
    """Cuts windows. Without a token limit a window is one micro-batch already.

    Raises `BatchSizeError` when made with a token limit and no ``agree``.
    """

    def __init__(self, ops: BatchOps[B], max_tokens: int | None, agree: Agree | None) -> None:
        if max_tokens is not None and agree is None:
            raise BatchSizeError(
                f"max_tokens_per_micro_batch={max_tokens} needs agree=, an all-reduce (max) over "
                f"the data-parallel ranks: unequal numbers of micro-batches hang collectives. "
                f"Give agree=alone if there is one rank."
            )
        self._ops = ops
        self._max_tokens = max_tokens
        self._agree = agree or alone

    async def cut(self, window: B, calls: Calls, wait: Wait) -> list[B]:
        """The micro-batches of a window, none of them empty. ``calls`` makes the call of ``agree``.

        Raises `SampleTooLong`, `CountsDisagree`, `BadBatch`, and what ``agree`` raises.
        """
        if self._max_tokens is None:
            return [window]
        lengths = sample_lengths(self._ops, window)
        wanted = fewest_micro_batches(lengths, self._max_tokens)
        count = await calls.result(("agree", id(window)), lambda: self._agree(wanted), wait)
        if count < wanted:
            raise CountsDisagree(
                f"agree({wanted}) gave {count}: this rank exceeds {self._max_tokens} tokens "
                f"with fewer than {wanted} micro-batches. agree must return the maximum over ranks."
            )
        return [select(self._ops, window, part) for part in balance(lengths, count)]


class SampleQueue(Generic[B]):
    """Samples in order of arrival. A batch is sliced where a requested count ends inside it."""

    def __init__(self, ops: BatchOps[B]) -> None:
        self._ops = ops
        self._batches: deque[tuple[B, int]] = deque()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, batch: B) -> None:
        """Queue the samples of a batch; a batch without samples is ignored."""
        size = self._ops.size(batch)
        if size:
            self._batches.append((batch, size))
            self._size += size

    def put_back(self, batches: Iterable[B]) -> None:
        """Queue batches, in their order, at the head of the queue."""
        for batch in reversed(list(batches)):
            size = self._ops.size(batch)
            self._batches.appendleft((batch, size))
            self._size += size

    def peek(self, count: int) -> B:
        """The first ``count`` samples (at least 1, at most ``len``), which stay queued."""
        pieces: list[B] = []
        for batch, size in self._batches:
            if size > count:
                pieces.append(self._ops.slice(batch, 0, count))
                break
            pieces.append(batch)
            count -= size
            if count == 0:
                break
        return join(self._ops, pieces)

    def drop(self, count: int) -> None:
        """Remove the first ``count`` samples (at most ``len``)."""
        self._size -= count
        while count:
            batch, size = self._batches.popleft()
            if size > count:
                self._batches.appendleft((self._ops.slice(batch, count, size), size - count))
                return
            count -= size


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
        """calls of all handlers of the iterator"""
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


class BatchResizingIterator(Generic[B]):
    """Reads batches of any size and yields micro-batches, global batch after global batch.

    ``async for`` runs until every sender has closed; `global_batch` stops after the samples of
    one optimizer step; `blocking` is the same for a compute thread. One task or thread pulls at a
    time.

    Args:
        receiver: where the batches come from.
        ops: how to measure, cut and join them: `ListOps`, `DictOps`, `StructOps` or your own.
        total_batch_size: samples of a step on this rank.
        num_global_batches: optimizer steps in a step; must divide ``total_batch_size``.
        micro_batch_size: samples of each micro-batch; must divide the global batch.
        max_tokens_per_micro_batch: token limit of each micro-batch, instead. The samples of a
            window are then reordered, so that micro-batches hold about equally many tokens.
        balance_window: samples per window; must divide the global batch, which is the default.
        on_batch: called on every batch received that has samples (advantages). May change its size.
        on_global_batch: called on every global batch before it is cut (normalisation). Must keep
            its size. Makes the iterator gather a whole global batch before it yields.
        agree: needed with a token limit: makes the number of micro-batches of each window the same
            on every rank, called once per window. A single rank gives `alone`.
        key: reads only the items of this key.
        keep_batches: keep yielded batches for `get_all_batches`, which must then be called.

    Raises `BatchSizeError` when built with sizes that do not fit one another. A pull raises
    `HandlerFailed`, `BadBatch`, `SampleTooLong`, `CountsDisagree`, `IncompleteBatch`, and what the
    receiver or ``agree`` raises.
    """

    def __init__(
        self,
        receiver: Receiver[B],
        ops: BatchOps[B],
        *,
        total_batch_size: int,
        num_global_batches: int = 1,
        micro_batch_size: int | None = None,
        max_tokens_per_micro_batch: int | None = None,
        balance_window: int | None = None,
        on_batch: Handler[B] | None = None,
        on_global_batch: Handler[B] | None = None,
        agree: Agree | None = None,
        key: Key | None = None,
        keep_batches: bool = False,
    ) -> None:
        self._sizes = BatchSizes(
            total_batch_size=total_batch_size,
            num_global_batches=num_global_batches,
            micro_batch_size=micro_batch_size,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            balance_window=balance_window,
        )
        self._ops = ops
        self._intake = Intake(receiver, ops, on_batch, key)
        self._on_global_batch = on_global_batch
        self._cutter = Cutter(ops, max_tokens_per_micro_batch, agree)
        self._gathered: list[B] = []
        """source batches of windows and ready micro-batches, while no global batch is open"""
        self._windows: deque[B] = deque()
        self._ready: deque[B] = deque()
        self._kept: list[B] | None = [] if keep_batches else None
        self._taken = 0
        """yielded samples of the open global batch"""
        self._finished_global_batches = 0
        self._busy = False

    # -- pulling ------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> B:
        try:
            return await self.pull(wait_here)
        except EndOfChannel:
            raise StopAsyncIteration from None

    async def global_batch(self) -> AsyncGenerator[B, None]:
        """The micro-batches up to the end of a global batch.

        Raises `EndOfChannel` when the channel ended before the global batch began.
        """
        last = False
        while not last:
            micro_batch = await self.pull(wait_here)
            last = self.finished_global_batch
            yield micro_batch

    async def peek(self, wait: Wait = wait_here, /) -> B:
        """The next micro-batch, which stays queued and counts as taken only when it is taken.

        ``wait`` says how to wait, for drivers; others leave it out.
        """
        with self._exclusive():
            await self._prepare(wait)
            return self._ready[0]

    async def count(self, wait: Wait = wait_here, /) -> int:
        """Micro-batches left in the open, or else the next, global batch.

        The number is known at once for a fixed size; with a token limit this waits for the whole
        global batch. ``wait`` says how to wait, for drivers; others leave it out.
        """
        with self._exclusive():
            left = self._sizes.global_batch_size - self._taken
            if self._sizes.micro_batch_size is not None:
                return left // self._sizes.micro_batch_size
            while self._size_of(self._ready) < left:
                await self._cut_next(wait)
            return len(self._ready)

    def blocking(self, loop: asyncio.AbstractEventLoop) -> BlockingBatches[B]:
        """A view for a compute thread; ``loop`` runs the receiver."""
        return BlockingBatches(self, loop)

    # -- between pulls ------------------------------------------------------------------------

    @property
    def sizes(self) -> BatchSizes:
        """The sizes in force."""
        return self._sizes

    @property
    def finished_global_batch(self) -> bool:
        """Whether no global batch is open: the last taken micro-batch ended its global batch."""
        return self._taken == 0

    @property
    def finished_global_batches(self) -> int:
        """Global batches taken completely so far."""
        return self._finished_global_batches

    @property
    def queued_samples(self) -> int:
        """Samples that are handled but not taken yet."""
        return len(self._intake.samples) + self._size_of(self._windows) + self._size_of(self._ready)

    @property
    def empty_batches(self) -> int:
        """Received batches without samples, which were skipped."""
        return self._intake.empty_batches

    def check_finished_global_batch(self) -> None:
        """Raise `UnfinishedGlobalBatch` if a global batch is open."""
        if not self.finished_global_batch:
            raise UnfinishedGlobalBatch(
                f"global batch {self._finished_global_batches} is open: {self._taken} of its "
                f"{self._sizes.global_batch_size} samples have been taken. Take the rest first."
            )

    def get_all_batches(self) -> B | None:
        """All micro-batches taken since the last call, joined; None if there are none.

        Raises `BatchingError` unless built with ``keep_batches=True``.
        """
        if self._kept is None:
            raise BatchingError(
                "batches are not kept after they are taken: build the iterator with "
                "keep_batches=True to use get_all_batches()"
            )
        kept, self._kept = self._kept, []
        return join(self._ops, kept) if kept else None

    def reset_total_batch_size(self, total_batch_size: int) -> None:
        """Use another share of the step from the next global batch on.

        The number of global batches stays. Queued samples, also those that were cut already, are
        cut again, and ``on_global_batch`` is called again with the samples as they were before its
        first call. With a token limit every rank must call this after the same global batch.

        Raises:
            UnfinishedGlobalBatch: a global batch is open.
            BatchSizeError: the new sizes do not fit; the old ones stay in force.
            IteratorBusy: a pull is under way.
        """
        with self._exclusive():
            self.check_finished_global_batch()
            self._sizes = self._sizes.with_total(total_batch_size)
            self._intake.samples.put_back(self._gathered)
            self._gathered.clear()
            self._windows.clear()
            self._ready.clear()
            self._intake.calls.forget("on_global_batch", "agree")

    # -- one pull, on the loop or in a thread --------------------------------------------------

    async def pull(self, wait: Wait, /) -> B:
        """Take the next micro-batch. For drivers: others use ``async for`` or `blocking`."""
        with self._exclusive():
            await self._prepare(wait)
            return self._take()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._busy:
            raise IteratorBusy(
                "another task or thread is pulling from this iterator: give each consumer its "
                "own iterator over a clone of the receiver"
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _take(self) -> B:
        micro_batch = self._ready.popleft()
        self._gathered.clear()  # the global batch is open: its samples are not put back any more
        self._taken += self._ops.size(micro_batch)
        if self._taken == self._sizes.global_batch_size:
            self._taken = 0
            self._finished_global_batches += 1
        if self._kept is not None:
            self._kept.append(micro_batch)
        return micro_batch

    async def _prepare(self, wait: Wait) -> None:
        while not self._ready:
            await self._cut_next(wait)

    async def _cut_next(self, wait: Wait) -> None:
        if not self._windows:
            await self._gather(wait)
        micro_batches = await self._cutter.cut(self._windows[0], self._intake.calls, wait)
        self._windows.popleft()
        self._ready.extend(micro_batches)

    async def _gather(self, wait: Wait) -> None:
        size = self._sizes.window_size
        if self._on_global_batch is not None:
            size = self._sizes.global_batch_size
        try:
            await self._intake.fill(size, wait)
        except EndOfChannel:
            self._check_step_complete()
            raise
        gathered = self._intake.samples.peek(size)
        handled = await self._handle_global_batch(gathered, wait)
        windows = list(self._even_parts(handled, self._sizes.window_size))
        self._intake.samples.drop(size)
        self._windows.extend(windows)
        self._gathered.append(gathered)

    async def _handle_global_batch(self, batch: B, wait: Wait) -> B:
        if self._on_global_batch is None:
            return batch
        size, index = self._ops.size(batch), self._finished_global_batches
        handled = await call(
            self._on_global_batch, batch, "on_global_batch", index, self._intake.calls, wait
        )
        if self._ops.size(handled) != size:
            raise BadBatch(
                f"on_global_batch returned {self._ops.size(handled)} samples for the {size} of "
                f"global batch {index}: it must keep their number (mask samples instead)"
            )
        return handled

    def _check_step_complete(self) -> None:
        position = self._finished_global_batches % self._sizes.num_global_batches
        have = self._taken + self.queued_samples
        if have or position:
            raise IncompleteBatch(
                have=have,
                size=self._sizes.global_batch_size,
                position=position,
                count=self._sizes.num_global_batches,
            ) from None

    def _even_parts(self, batch: B, size: int) -> Iterator[B]:
        whole = self._ops.size(batch)
        if whole == size:
            return iter([batch])
        return (self._ops.slice(batch, at, at + size) for at in range(0, whole, size))

    def _size_of(self, batches: deque[B]) -> int:
        return sum(self._ops.size(batch) for batch in batches)
