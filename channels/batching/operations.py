"""Operations on a batch that the iterator needs: measure, slice and join.

`ListOps` serves lists of samples, `DictOps` and `StructOps` serve batches made of columns. Anything
else needs the four methods of `BatchOps`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from rlinf_async.channels.batching.errors import BadBatch

B = TypeVar("B")
T = TypeVar("T")


class BatchOps(Protocol[B]):
    """Operations on a batch of type ``B``. No operation changes its argument."""

    def size(self, batch: B, /) -> int:
        """Number of samples."""
        ...

    def slice(self, batch: B, start: int, stop: int, /) -> B:
        """Samples ``start`` to ``stop`` (not included); may share memory with ``batch``."""
        ...

    def concat(self, batches: Sequence[B], /) -> B:
        """The samples of all batches, in order; there are at least two batches."""
        ...

    def lengths(self, batch: B, /) -> Sequence[int]:
        """Tokens of each sample; called only with a token limit."""
        ...


class ListOps(Generic[T]):
    """Batches that are lists of samples. ``length`` gives the tokens of a sample."""

    def __init__(self, length: Callable[[T], int] | None = None) -> None:
        self._length = length

    def size(self, batch: list[T], /) -> int:
        return len(batch)

    def slice(self, batch: list[T], start: int, stop: int, /) -> list[T]:
        return batch[start:stop]

    def concat(self, batches: Sequence[list[T]], /) -> list[T]:
        return [sample for batch in batches for sample in batch]

    def lengths(self, batch: list[T], /) -> Sequence[int]:
        if self._length is None:
            raise BadBatch(
                "the tokens of a sample are not known: give ListOps(length=...) a function that "
                "counts them, or use micro_batch_size"
            )
        return [self._length(sample) for sample in batch]


def select(ops: BatchOps[B], batch: B, indices: Sequence[int]) -> B:
    """The samples at ``indices`` (increasing); adjacent samples are taken as one slice."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return join(ops, [ops.slice(batch, start, stop) for start, stop in runs])


def join(ops: BatchOps[B], batches: Sequence[B]) -> B:
    """Concatenate at least one batch; a single one is returned as it is."""
    return batches[0] if len(batches) == 1 else ops.concat(batches)


def sample_lengths(ops: BatchOps[B], batch: B) -> list[int]:
    """Tokens of each sample, checked: whole, not negative, one for each sample."""
    try:
        lengths = [operator.index(length) for length in ops.lengths(batch)]
    except TypeError as error:
        raise BadBatch(f"lengths must be whole numbers of tokens: {error}") from error
    if len(lengths) != ops.size(batch):
        raise BadBatch(f"{len(lengths)} lengths were given for {ops.size(batch)} samples")
    for index, length in enumerate(lengths):
        if length < 0:
            raise BadBatch(f"the length of sample {index} is negative: {length}")
    return lengths
