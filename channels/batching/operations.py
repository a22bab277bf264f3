"""Batches made of columns: dicts and Structs of arrays or lists, one entry for each sample.

A *column* is any field with a length and slices: a list, a numpy array, a torch tensor, with
samples along the first axis. A dict inside is a group of columns. Every other field (numbers,
strings, None), and every name in ``shared``, belongs to the batch as a whole: it is part of each
slice, and must be equal in batches that are joined.

Operations on a batch that the iterator needs: measure, slice and join.

`ListOps` serves lists of samples, `DictOps` and `StructOps` serve batches made of columns. Anything
else needs the four methods of `BatchOps`.
"""

from __future__ import annotations

import abc
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from rlinf_async.channels.errors import BadBatch

B = TypeVar("B")
S = TypeVar("S", bound=msgspec.Struct)

Concatenate = Callable[[list[Any]], Any]


class ColumnOps(abc.ABC, Generic[B]):
    """Base class of `DictOps` and `StructOps`.

    Args:
        lengths: name of the column with the tokens of each sample, for token limits.
        shared: fields that look like columns but belong to the batch as a whole.
        concatenate: joins the arrays of one column, along the first axis. By default the arrays'
            own library does (``numpy.concatenate``, ``torch.concatenate``).
    """

    def __init__(
        self,
        *,
        lengths: str | None = None,
        shared: Collection[str] = (),
        concatenate: Concatenate | None = None,
    ) -> None:
        self._lengths = lengths
        self._shared = frozenset(shared)
        self._concatenate = concatenate or concatenate_arrays

    @abc.abstractmethod
    def fields(self, batch: B) -> Mapping[str, Any]:
        """Every field of the batch by name."""

    @abc.abstractmethod
    def rebuild(self, like: B, fields: dict[str, Any]) -> B:
        """A batch of the same type with these fields."""

    def size(self, batch: B, /) -> int:
        sizes = dict(self._sizes(self.fields(batch)))
        if not sizes:
            raise BadBatch(f"a batch of type {type(batch).__name__} has no columns to count")
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise BadBatch(
                f"the columns of a {type(batch).__name__} differ in their number of samples "
                f"({listed}). Name a field that is not one entry per sample in shared=."
            )
        return next(iter(sizes.values()))

    def slice(self, batch: B, start: int, stop: int, /) -> B:
        return self.rebuild(batch, self._slice(self.fields(batch), start, stop))

    def concat(self, batches: Sequence[B], /) -> B:
        return self.rebuild(batches[0], self._concat([self.fields(batch) for batch in batches]))

    def lengths(self, batch: B, /) -> Sequence[int]:
        fields = self.fields(batch)
        if self._lengths is None or self._lengths not in fields:
            named = (
                "no column was named"
                if self._lengths is None
                else f"there is no column {self._lengths!r}"
            )
            raise BadBatch(
                f"the tokens of each sample are not known: {named}. Give lengths= one of the "
                f"columns ({', '.join(fields)}), or use micro_batch_size."
            )
        column: Sequence[int] = fields[self._lengths]
        return column

    def _sizes(self, fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
        for name, value in fields.items():
            if isinstance(value, dict) and name not in self._shared:
                yield from ((f"{name}.{inner}", size) for inner, size in self._sizes(value))
            elif self._is_column(name, value):
                yield name, len(value)

    def _is_column(self, name: str, value: Any) -> bool:
        if name in self._shared or isinstance(value, (str, bytes, dict)):
            return False
        try:
            len(value)
        except TypeError:  # a number, None, or an array of no dimensions
            return False
        return hasattr(value, "__getitem__")

    def _slice(self, fields: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        return {name: self._part(name, value, start, stop) for name, value in fields.items()}

    def _part(self, name: str, value: Any, start: int, stop: int) -> Any:
        if isinstance(value, dict) and name not in self._shared:
            return self._slice(value, start, stop)
        return value[start:stop] if self._is_column(name, value) else value

    def _concat(self, batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names = batches[0].keys()
        for batch in batches:
            if batch.keys() != names:
                differing = ", ".join(sorted(batch.keys() ^ names))
                raise BadBatch(f"batches cannot be joined: not all of them have {differing}")
        return {name: self._join(name, [batch[name] for batch in batches]) for name in names}

    def _join(self, name: str, values: list[Any]) -> Any:
        if name not in self._shared and all(isinstance(value, dict) for value in values):
            return self._concat(values)
        columns = [self._is_column(name, value) for value in values]
        if all(columns):
            return self._concatenate(values)
        for value in values:
            if any(columns) or not _same(value, values[0]):
                raise BadBatch(
                    f"batches cannot be joined: {name!r} belongs to the batch as a whole and "
                    f"differs ({values[0]!r:.60} and {value!r:.60}). Make it a column."
                )
        return values[0]


class DictOps(ColumnOps[dict[str, Any]]):
    """Batches that are dicts of columns; see `ColumnOps`."""

    def fields(self, batch: dict[str, Any]) -> Mapping[str, Any]:
        return batch

    def rebuild(self, like: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        return fields


class StructOps(ColumnOps[S]):
    """Batches that are Structs of columns; see `ColumnOps`."""

    def fields(self, batch: S) -> Mapping[str, Any]:
        return msgspec.structs.asdict(batch)

    def rebuild(self, like: S, fields: dict[str, Any]) -> S:
        return msgspec.structs.replace(like, **fields)


def concatenate_arrays(arrays: list[Any]) -> Any:
    """Join lists, tuples, or the arrays of any library that has a ``concatenate``.

    Raises `BadBatch` for any other type.
    """
    kind = type(arrays[0])
    if issubclass(kind, (list, tuple)):
        return kind(item for array in arrays for item in array)
    # The library of an existing array is loaded already: this module need not import it.
    library = sys.modules.get(kind.__module__.partition(".")[0])
    concatenate: Concatenate | None = getattr(library, "concatenate", None)
    if concatenate is None:
        raise BadBatch(f"columns of type {kind.__qualname__} need concatenate=, a joining function")
    return concatenate(arrays)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if getattr(one, "shape", ()) != getattr(other, "shape", ()):
        return False  # values of different shapes would be broadcast, or cannot be compared
    equal = (one == other) | ((one != one) & (other != other))  # NaN is the same as NaN here
    return bool(equal.all() if hasattr(equal, "all") else equal)


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
