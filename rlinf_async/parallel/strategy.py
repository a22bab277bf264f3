"""Parallel strategies, and the models that they spread over ranks.

Ranks are numbered as Megatron's default order ``tp-cp-ep-dp-pp`` does: tensor-parallel neighbours
are next to each other, pipeline stages farthest apart. For experts the same ranks form a
grid of their own::

    dense      rank = tp + TP x (cp + CP x (dp + DP x stage))
    experts    rank = etp + ETP x (ep + EP x (edp + EDP x stage)),   ETP x EP x EDP = TP x CP x DP

Context-parallel ranks hold the same parameters, so data-sharding spreads over ``DP x CP`` ranks.

A *global tensor* is a tensor of a checkpoint: whole, unfused, unpadded. A *parameter* has one name
in one backend: some global tensors, cut over the tensor-parallel ranks by a `Split`
and put one behind the other. Two backends that hold the same global tensors in different
parameters (``q_proj``, ``k_proj``, ``v_proj`` here, ``qkv_proj`` there) can exchange weights;
nothing else need agree. Optimizer moments have the shapes of their tensors: the layout and the plan
of the weights are theirs too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from rlinf_async.parallel.sharding import Replicated, Sharding
from rlinf_async.parallel.splits import (
    UNEVEN,
    ModelMismatch,
    Split,
    Stacked,
    StrategyError,
    Whole,
    nearest_divisors,
    nearest_names,
)


class Strategy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The spread of a model over ``world_size`` ranks. Raises `StrategyError` for invalid sizes."""

    dp: int = 1
    """data-parallel size: ranks that train on different samples"""
    tp: int = 1
    """tensor-parallel size"""
    pp: int = 1
    """pipeline stages"""
    cp: int = 1
    """context-parallel size"""
    ep: int = 1
    """expert-parallel size, taken from the ranks of ``tp x cp x dp``"""
    expert_tp: int | None = None
    """tensor-parallel size inside an expert; that of the rest by default"""
    sharding: Sharding = Replicated()
    """sharding of a parameter over data- and context-parallel ranks"""
    stage_layers: tuple[int, ...] | None = None
    """layers of each model chunk, first to last; equal by default"""
    virtual_stages: int = 1
    """model chunks of each stage (interleaved schedule): chunk c is on stage ``c % pp``"""

    def __post_init__(self) -> None:
        faults = [
            f"{name}={value} must be at least 1"
            for name in ("dp", "tp", "pp", "cp", "ep", "virtual_stages")
            if (value := getattr(self, name)) < 1
        ]
        if self.expert_tp is not None and self.expert_tp < 1:
            faults.append(f"expert_tp={self.expert_tp} must be at least 1")
        if not faults and self.data_ranks % self.sharding.replicas:
            faults.append(
                f"sharding.replicas={self.sharding.replicas} does not divide dp x cp = "
                f"{self.data_ranks}; nearest that does: "
                f"{nearest_divisors(self.sharding.replicas, self.data_ranks)}"
            )
        if not faults and (self.tp * self.data_ranks) % (self.expert_size * self.ep):
            fitting = self.tp * self.data_ranks // self.expert_size
            faults.append(
                f"ep={self.ep} x expert_tp={self.expert_size} does not divide tp x cp x dp = "
                f"{self.tp * self.data_ranks}"
                + (f"; nearest ep: {nearest_divisors(self.ep, fitting)}" if fitting else "")
            )
        if faults:
            raise StrategyError(faults)

    @property
    def sizes(self) -> str:
        """The sizes as text: ``"tp=2 x dp=4"``; those of 1 are left out, but for dp."""
        names = ("tp", "pp", "cp", "ep", "virtual_stages")
        above = [f"{one}={getattr(self, one)}" for one in names if getattr(self, one) > 1]
        return " x ".join([*above, f"dp={self.dp}"])

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def data_ranks(self) -> int:
        """The number of ranks that hold the same dense slice before sharding."""
        return self.dp * self.cp

    @property
    def expert_size(self) -> int:
        """The tensor-parallel size inside an expert."""
        return self.tp if self.expert_tp is None else self.expert_tp

    @property
    def expert_data_ranks(self) -> int:
        """The number of ranks that hold the same slice of the same expert before sharding."""
        return self.tp * self.data_ranks // (self.expert_size * self.ep)

    def dense_ranks(self, stage: int, tp_rank: int) -> range:
        """Return the ranks that share one dense slice, in data-parallel order."""
        first = tp_rank + self.tp * self.data_ranks * stage
        return range(first, first + self.tp * self.data_ranks, self.tp)

    def expert_ranks(self, stage: int, tp_rank: int, ep_rank: int) -> range:
        """Return the ranks that share one slice of their experts, in expert-data-parallel order."""
        step = self.expert_size * self.ep
        first = tp_rank + self.expert_size * ep_rank + step * self.expert_data_ranks * stage
        return range(first, first + step * self.expert_data_ranks, step)

    def layer_faults(self, layers: int) -> list[str]:
        """Return why ``layers`` layers cannot be put on the stages, one line each."""
        chunks = self.pp * self.virtual_stages
        if self.stage_layers is not None:
            if len(self.stage_layers) != chunks or sum(self.stage_layers) != layers:
                given = f"{sum(self.stage_layers)} layers on {len(self.stage_layers)} chunks"
                return [
                    f"stage_layers={list(self.stage_layers)} is {given}, not {layers} on {chunks}"
                ]
            return ["stage_layers has a negative count"] if min(self.stage_layers) < 0 else []
        if layers % chunks == 0:
            return []
        name = f"pp={self.pp}" + (
            f" x virtual_stages={self.virtual_stages}" if chunks > self.pp else ""
        )
        fault = (
            f"{name} does not divide {layers} layers; nearest: {nearest_divisors(chunks, layers)}"
        )
        if chunks > layers:
            return [fault]
        return [f"{fault}{UNEVEN}{list(even_layers(layers, chunks))}"]

    def stage_of_layers(self, layers: int) -> list[int]:
        """Return the pipeline stage of each layer. Raises `StrategyError`."""
        faults = self.layer_faults(layers)
        if faults:
            raise StrategyError(faults)
        counts = self.stage_layers or even_layers(layers, self.pp * self.virtual_stages)
        return [chunk % self.pp for chunk, count in enumerate(counts) for _ in range(count)]


def even_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Spread layers over chunks; a remainder goes to the middle, away from the embeddings."""
    counts = [layers // chunks] * chunks
    middle = sorted(range(chunks), key=lambda chunk: (abs(2 * chunk - (chunks - 1)), chunk))
    for chunk in middle[: layers % chunks]:
        counts[chunk] += 1
    return tuple(counts)


def valid_dp_sizes(mini_batch: int, *, group_size: int = 1, at_most: int) -> list[int]:
    """Return the data-parallel sizes up to ``at_most`` that can share a mini-batch of whole groups.

    ``mini_batch`` is in samples; ``dp x group_size`` must divide it.
    """
    return [dp for dp in range(1, at_most + 1) if mini_batch % (dp * group_size) == 0]


def check_batch(mini_batch: int, dp: int, *, group_size: int = 1) -> None:
    """Raise `StrategyError`, naming the nearest sizes, unless ``dp`` ranks can share the
    mini-batch."""
    if mini_batch % (dp * group_size) == 0:
        return
    if mini_batch % group_size:
        nearest = "no dp does: the groups are not whole"
    else:
        nearest = f"nearest that does: {nearest_divisors(dp, mini_batch // group_size)}"
    fault = (
        f"dp={dp} x group_size={group_size} does not divide a mini-batch of {mini_batch} samples"
    )
    raise StrategyError([f"{fault}; {nearest}"])


ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
}
"""bytes of one element, by torch's name of the dtype"""


class GlobalTensor(msgspec.Struct, frozen=True):
    """A whole tensor of the model, wherever its slices are."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ModelMismatch(
                f"{self.name!r} has dtype {self.dtype!r}; known: {', '.join(ITEM_BYTES)}"
            )
        if any(extent < 0 for extent in self.shape):
            raise ModelMismatch(f"{self.name!r} has shape {list(self.shape)}")

    @property
    def elements(self) -> int:
        """The number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter of a backend: one or more global tensors under one name."""

    name: str
    tensors: tuple[GlobalTensor, ...]
    split: Split = Whole()
    """rule by which the tensors are cut over tensor-parallel ranks and joined"""
    layer: int | None = None
    """layer of the parameter, which decides its pipeline stage"""
    stage: Literal["every", "first", "last"] = "every"
    """pipeline stage of a parameter without a layer; ``every``: a copy on each stage"""
    tied_to: str | None = None
    """name of the parameter that shares its storage where one rank has both"""
    expert: tuple[int, int] | None = None
    """``(index, experts)`` of a parameter of one expert, which only that expert's ranks have"""
    sharded: bool = True
    """whether data-parallel ranks shard it; buffers are kept whole"""

    @property
    def of_experts(self) -> bool:
        """Whether the expert-parallel grid holds it."""
        return self.expert is not None or isinstance(self.split, Stacked)


class Model(msgspec.Struct, frozen=True):
    """The parameters of a model, in the order in which its backend registers them."""

    parameters: tuple[Parameter, ...]
    layers: int = 0
    """number of layers that the pipeline stages share"""

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]], dtype: str = "float32") -> Model:
        """Make a model of whole tensors: what FSDP needs, and all of a model that is not cut by TP
        or PP."""
        tensors = [GlobalTensor(name, tuple(shape), dtype) for name, shape in shapes.items()]
        return cls(tuple(Parameter(name=one.name, tensors=(one,)) for one in tensors))

    def tensors(self) -> dict[str, GlobalTensor]:
        """Return the global tensors by name, in order of first use.

        Raises `ModelMismatch` when one name has two shapes or dtypes.
        """
        found: dict[str, GlobalTensor] = {}
        for parameter in self.parameters:
            for tensor in parameter.tensors:
                known = found.setdefault(tensor.name, tensor)
                if known != tensor:
                    raise ModelMismatch(
                        f"{tensor.name!r} is {describe(known)} and {describe(tensor)} in one model"
                    )
        return found

    def check_shapes(self, live: Mapping[str, Iterable[int]]) -> None:
        """Raise `ModelMismatch`, naming every difference, unless ``live`` has these tensors."""
        expected = self.tensors()
        faults = [
            f"unknown {name!r}{nearest_names(name, expected)}"
            for name in live
            if name not in expected
        ]
        faults += [f"missing {name!r}" for name in expected if name not in live]
        faults += [
            f"{name!r} is {list(live[name])}, expected {list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in live and tuple(live[name]) != tensor.shape
        ]
        if faults:
            more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
            raise ModelMismatch(f"the model's tensors: {'; '.join(faults[:8])}{more}")


def describe(tensor: GlobalTensor) -> str:
    """Return ``"float32 [4, 8]"``."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def nested_order(ranks: int) -> tuple[int, ...]:
    """Return which of ``0 .. ranks - 1`` holds shard 0, 1, ...: by their van der Corput numbers.

    ::

        shard            0 1 2 3 4 5 6 7
        2 ranks    held  0       1
        4 ranks    by    0   2   1   3
        8 ranks          0 4 2 6 1 5 3 7
        3 ranks          0  2  1

    A rank has the same place among any number of ranks, as far as there are places: the order of n
    is that of n + 1 without the last rank. So the size alone says it, whatever the sizes before.

    The number of a rank is its binary digits, the lowest first, behind the point. Where powers of
    two double or halve, every rank keeps all that it can, and half of the bytes travel; in the
    natural order three quarters do from 2 to 4 ranks, seven eighths from 4 to 8. No other change
    leaves less in place than in the natural order, but for tensors whose rows the ranks do not
    divide.
    """
    digits = max(ranks - 1, 0).bit_length()
    return tuple(sorted(range(ranks), key=lambda rank: f"{rank:0{digits}b}"[::-1]))


class DataRank(NamedTuple):
    """Share of the samples that a rank trains on: several ranks may hold parts of one model, for
    the same ones.

    ::

        tp=2, dp=2      launched rank   0   1   2   3
                        data rank       0   0   1   1
                        reads, writes   x       x       the others get batches from it
    """

    rank: int
    """number of the share, the key under which its samples arrive"""
    size: int
    """number of data ranks, which share a global batch"""
    is_io: bool = True
    """reads and writes channels for the ranks that have the same data rank"""
