"""Cuts a window of samples into micro-batches, equally many on every rank."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from rlinf_async.channels.batching.balance import balance, fewest_micro_batches
from rlinf_async.channels.batching.driving import Calls, Wait
from rlinf_async.channels.batching.errors import BatchSizeError, CountsDisagree
from rlinf_async.channels.batching.operations import BatchOps, sample_lengths, select

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
