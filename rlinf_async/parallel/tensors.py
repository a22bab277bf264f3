"""Global tensors, and the parameters of a backend, in which a rank holds slices of them.

A *global tensor* is a tensor of a checkpoint: whole, unfused, unpadded. A *parameter* has one name
in one backend: some global tensors, cut over the tensor-parallel ranks by a `Split`
and put one behind the other. Two backends that hold the same global tensors in different
parameters (``q_proj``, ``k_proj``, ``v_proj`` here, ``qkv_proj`` there) can exchange weights;
nothing else need agree.

Optimizer moments have the shapes of their tensors: the layout and the plan of the weights are
theirs too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from rlinf_async.parallel.errors import ModelMismatch, nearest_names
from rlinf_async.parallel.splits import Split, Stacked, Whole

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
