"""Rules by which tensor-parallel ranks cut a parameter into boxes of its tensors.

::

    Whole          every rank has all of it                          norms, row-parallel biases
    ColumnParallel rows over ranks                                   weight [out, in] and bias [out]
    RowParallel    columns over ranks                                weight [out, in]
    Vocabulary     rows over ranks, padded so that they divide       embeddings, output layers
    Heads          rows over ranks by whole heads; where they may    q, k or v of one attention
                   be shared, few are held by several ranks each
    Joined         the ranks' slices of several tensors, in turn     gate and up; q, k and v
    GroupedHeads   q, k, v of each key-value group, in turn          Megatron's linear_qkv
    Stacked        one slice for each expert of this rank            fused experts

Invariant: a piece is a box of a global tensor that lies row-major and without gaps in the rank's
parameter. So the piece and its offset are enough to move any sub-box of it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

UNEVEN: Final = "; or stage_layers="
"""text in a line about layers, before the counts that would fit"""


class ParallelError(Exception):
    """Root of the errors about strategies, layouts and plans."""


class StrategyError(ParallelError, ValueError):
    """The strategy does not fit. ``faults`` has one line for each misfit."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(self.faults))


class ModelMismatch(ParallelError, ValueError):
    """Names, shapes or dtypes of tensors are not those that were expected."""


class NotHeld(ParallelError, ValueError):
    """Elements that the new layout needs are on no rank of the old one."""


class PlanTooLarge(ParallelError, ValueError):
    """The plan would have too many moves to be worth making."""


def nearest_names(name: str, names: Iterable[str]) -> str:
    """Return ``"; nearest: 'a', 'b'"``, or nothing when no name is near."""
    near = difflib.get_close_matches(name, list(names), 2, 0.6)
    return "; nearest: " + ", ".join(map(repr, near)) if near else ""


def nearest_divisors(value: int, *numbers: int) -> str:
    """Return the common divisors next to ``value``: ``"2 or 4"``."""
    common = math.gcd(*numbers)
    return nearest(value, [part for part in range(1, common + 1) if common % part == 0])


def nearest(value: int, fitting: Iterable[int]) -> str:
    """Return those of ``fitting``, which are in order, that are next to ``value``: ``"2 or 4"``."""
    known = list(fitting)
    below = [one for one in known if one < value][-1:]
    above = [one for one in known if one > value][:1]
    return " or ".join(map(str, below + above))


Shape = tuple[int, ...]


class ParameterPiece(NamedTuple):
    """A box of one tensor inside a rank's parameter."""

    part: int
    """index of the tensor among the parameter's"""
    start: Shape
    size: Shape
    offset: int
    """elements before it in the rank's parameter, row-major"""


class Cut(NamedTuple):
    """One rank's parameter: its shape and its pieces. Elements in no piece are padding."""

    shape: Shape
    pieces: tuple[ParameterPiece, ...]


def divides(field: str, value: int, what: str, number: int) -> list[str]:
    """Return the fault, with the nearest values that do, unless ``value`` divides ``number``."""
    if number % value == 0:
        return []
    return [
        f"{field}={value} does not divide {number} {what}; nearest that does: {near}"
        for near in [nearest_divisors(value, number)]
    ]


class Split(Protocol):
    """A rule that cuts a parameter's tensors over ``tp`` ranks: hashable, and equal by value."""

    def faults(self, shapes: Sequence[Shape], tp: int, ep: int) -> list[str]:
        """Return one line for every reason why the tensors cannot be cut so."""
        ...

    def cut(
        self, shapes: Sequence[Shape], tp: int, rank: int, ep: int = 1, ep_rank: int = 0
    ) -> Cut:
        """Return the part of tensor-parallel rank ``rank`` of ``tp``. Call `faults` first."""
        ...

    def __hash__(self) -> int: ...


class Whole(msgspec.Struct, frozen=True):
    """Every tensor-parallel rank has all of the one tensor."""

    def faults(self, shapes: Sequence[Shape], tp: int, ep: int) -> list[str]:
        return _one(shapes)

    def cut(
        self, shapes: Sequence[Shape], tp: int, rank: int, ep: int = 1, ep_rank: int = 0
    ) -> Cut:
        [shape] = shapes
        return Cut(shape, (ParameterPiece(0, (0,) * len(shape), shape, 0),))


class ColumnParallel(msgspec.Struct, frozen=True):
    """Rows ``[out, ...]`` over ranks: Megatron's column-parallel linear layer."""

    def faults(self, shapes: Sequence[Shape], tp: int, ep: int) -> list[str]:
        return _one(shapes, 1) or divides("tp", tp, "rows", shapes[0][0])

    def cut(
        self, shapes: Sequence[Shape], tp: int, rank: int, ep: int = 1, ep_rank: int = 0
    ) -> Cut:
        [shape] = shapes
        return _rows(shape, rank * (shape[0] // tp), shape[0] // tp)


class RowParallel(msgspec.Struct, frozen=True):
    """Columns ``[out, in]`` over ranks: Megatron's row-parallel linear layer."""

    def faults(self, shapes: Sequence[Shape], tp: int, ep: int) -> list[str]:
        return _one(shapes, 2) or divides("tp", tp, "columns", shapes[0][1])

    def cut(
        self, shapes: Sequence[Shape], tp: int, rank: int, ep: int = 1, ep_rank: int = 0
    ) -> Cut:
        [shape] = shapes
        width = shape[1] // tp
        size = (shape[0], width, *shape[2:])
        return Cut(size, (ParameterPiece(0, (0, rank * width, *(0,) * (len(shape) - 2)), size, 0),))


class Vocabulary(msgspec.Struct, frozen=True):
    """Rows over ranks after padding to a multiple, so that any ``tp`` divides them.

    vLLM pads to 64 whatever ``tp`` is; Megatron to ``make_vocab_size_divisible_by x tp``
    (`per_rank`)."""

    multiple: int = 1
    per_rank: bool = False

    def padded(self, rows: int, tp: int) -> int:
        """Return how many rows all ranks have together."""
        multiple = self.multiple * tp if self.per_rank else math.lcm(self.multiple, 1)
        return -(-rows // multiple) * multiple

    def faults(self, shapes: Sequence[Shape], tp: int, ep: int) -> list[str]:
        return _one(shapes, 1) or divides(
            "tp", tp, "padded vocabulary rows", self.padded(shapes[0][0], tp)
        )

    def cut(
        self, shapes: Sequence[Shape], tp: int, rank: int, ep: int = 1, ep_rank: int = 0
    ) -> Cut:
        [shape] = shapes
        rows = self.padded(shape[0], tp) // tp
        start = min(rank * rows, shape[0])
        held = _rows(shape, start, min(rows, shape[0] - start))
        return Cut((rows, *shape[1:]), held.pieces)


class Heads(msgspec.Struct, frozen=True):
    """Rows over ranks by whole heads."""

    count: int
    shared: bool = False
    """whether ``tp / count`` ranks share a head where there are fewer heads than ranks, as for keys
    and values. (Ranks that shared a query's head would each multiply all of it by their part of the
    output's columns.)"""

    def faults(self, shapes: Sequence[Shape], tp: int, ep: int) -> list[str]:
        faults = _one(shapes, 1)
        if not faults and shapes[0][0] % self.count:
            faults = [f"{shapes[0][0]} rows are not {self.count} heads"]
        if faults or not self.shared:
            return faults or divides("tp", tp, "heads", self.count)
        fitting = [one for one in range(1, tp + self.count + 1) if self._shares(one)]
        if tp in fitting:
            return []
        near = nearest(tp, fitting)
        return [f"tp={tp} cannot share {self.count} key-value heads; nearest that can: {near}"]

    def _shares(self, tp: int) -> bool:
        return self.count % tp == 0 or tp % self.count == 0

    def cut(
        self, shapes: Sequence[Shape], tp: int, rank: int, ep: int = 1, ep_rank: int = 0
    ) -> Cut:
        [shape] = shapes
        start, count = self.held(tp, rank)
        head = shape[0] // self.count
        return _rows(shape, start * head, count * head)

    def held(self, tp: int, rank: int) -> tuple[int, int]:
        """Return the first head of a rank, and how many it has."""
        if tp > self.count:
            return rank // (tp // self.count), 1
        return rank * (self.count // tp), self.count // tp


class Joined(msgspec.Struct, frozen=True):
    """The slices of several tensors, each by its own rule, one behind the other."""

    splits: tuple[Split, ...]

    def faults(self, shapes: Sequence[Shape], tp: int, ep: int) -> list[str]:
        if len(shapes) != len(self.splits):
            return [f"{len(self.splits)} tensors are joined, {len(shapes)} were given"]
        if len({shape[1:] for shape in shapes}) > 1:
            return [f"shapes {', '.join(map(str, map(list, shapes)))} cannot be joined"]
        found = [
            fault
            for split, shape in zip(self.splits, shapes, strict=True)
            for fault in split.faults([shape], tp, ep)
        ]
        return list(dict.fromkeys(found))

    def cut(
        self, shapes: Sequence[Shape], tp: int, rank: int, ep: int = 1, ep_rank: int = 0
    ) -> Cut:
        cuts = [
            split.cut([shape], tp, rank) for split, shape in zip(self.splits, shapes, strict=True)
        ]
        return _one_behind_the_other(cuts, range(len(cuts)))


class GroupedHeads(msgspec.Struct, frozen=True):
    """Query, key and value ``[heads x head size, ...]``: for each key-value group its q heads, k,
    v.

    The row order of Megatron's ``linear_qkv``.
    """

    heads: int
    kv_heads: int

    def faults(self, shapes: Sequence[Shape], tp: int, ep: int) -> list[str]:
        if len(shapes) != 3:
            return [f"q, k and v are three tensors, {len(shapes)} were given"]
        if self.heads % self.kv_heads:
            return [f"{self.kv_heads} key-value heads do not divide {self.heads} heads"]
        found = [
            fault
            for shape, count in zip(shapes, (self.heads, self.kv_heads, self.kv_heads), strict=True)
            for fault in Heads(count).faults([shape], 1, ep)
        ]
        return found or divides("tp", tp, "key-value heads", self.kv_heads)

    def cut(
        self, shapes: Sequence[Shape], tp: int, rank: int, ep: int = 1, ep_rank: int = 0
    ) -> Cut:
        groups = self.kv_heads // tp
        each = [
            _rows(shape, group * (shape[0] // self.kv_heads), shape[0] // self.kv_heads)
            for group in range(rank * groups, (rank + 1) * groups)
            for shape in shapes
        ]
        return _one_behind_the_other(each, [index % 3 for index in range(len(each))])


class Stacked(msgspec.Struct, frozen=True):
    """Experts behind one another ``[experts of this rank, ...]``; tensors in turn for each
    expert. The expert-parallel grid holds it."""

    each: Split
    """rule for the tensors of one expert"""
    experts: int

    def faults(self, shapes: Sequence[Shape], tp: int, ep: int) -> list[str]:
        if not shapes or len(shapes) % self.experts:
            return [f"{len(shapes)} tensors are not {self.experts} equal experts"]
        of_one = len(shapes) // self.experts
        if any(shapes[i] != shapes[i % of_one] for i in range(len(shapes))):
            return ["the experts have different shapes"]
        return self.each.faults(shapes[:of_one], tp, 1) + divides("ep", ep, "experts", self.experts)

    def cut(
        self, shapes: Sequence[Shape], tp: int, rank: int, ep: int = 1, ep_rank: int = 0
    ) -> Cut:
        held, of_one = self.experts // ep, len(shapes) // self.experts
        one = self.each.cut(shapes[:of_one], tp, rank)
        length = math.prod(one.shape)
        pieces = [
            piece._replace(
                part=piece.part + (ep_rank * held + expert) * of_one,
                offset=piece.offset + expert * length,
            )
            for expert in range(held)
            for piece in one.pieces
        ]
        return Cut((held, *one.shape), tuple(pieces))


def _one(shapes: Sequence[Shape], dimensions: int = 0) -> list[str]:
    if len(shapes) != 1:
        return [f"one tensor is cut, {len(shapes)} were given"]
    if len(shapes[0]) < dimensions:
        return [f"shape {list(shapes[0])} has fewer than {dimensions} dimensions"]
    return []


def _rows(shape: Shape, start: int, count: int) -> Cut:
    size = (count, *shape[1:])
    if count == 0:
        return Cut(size, ())
    return Cut(size, (ParameterPiece(0, (start, *(0,) * (len(shape) - 1)), size, 0),))


def _one_behind_the_other(cuts: Sequence[Cut], parts: Sequence[int]) -> Cut:
    pieces: list[ParameterPiece] = []
    offset = 0
    for cut, part in zip(cuts, parts, strict=True):
        pieces += [piece._replace(part=part, offset=piece.offset + offset) for piece in cut.pieces]
        offset += math.prod(cut.shape)
    rows = sum(cut.shape[0] for cut in cuts)
    return Cut((rows, *cuts[0].shape[1:]), tuple(pieces))
