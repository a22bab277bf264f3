"""A configuration with every kind of field that the tests read, change and write."""

from __future__ import annotations

import enum
import pathlib
from typing import Annotated, Literal

import msgspec


class Kind(enum.Enum):
    ADAM = "adam"
    SGD = "sgd"


class Optimizer(msgspec.Struct, kw_only=True, frozen=True):
    kind: Kind = Kind.ADAM
    lr: float = 3e-4
    clip: float | None = 0.5


class Linear(msgspec.Struct, kw_only=True, frozen=True, tag="linear", tag_field="schedule"):
    until: int


class Constant(msgspec.Struct, kw_only=True, frozen=True, tag="constant", tag_field="schedule"):
    pass


class Actor(msgspec.Struct, kw_only=True, frozen=True):
    optimizer: Optimizer = Optimizer()
    hidden: tuple[int, ...] = (64, 64)
    mini_batch: Annotated[int, msgspec.Meta(ge=1)] = 64
    precision: Literal["float32", "bfloat16"] = "float32"
    decay: Linear | Constant = Constant()

    def __post_init__(self) -> None:
        if self.mini_batch % 2:
            raise ValueError(f"mini_batch must be even, got {self.mini_batch}")


class Env(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    options: dict[str, int] = {}


class Run(msgspec.Struct, kw_only=True, frozen=True):
    name: str = "run"
    folder: pathlib.Path | None = None
    actor: Actor = Actor(optimizer=Optimizer(lr=1e-3))
    envs: list[Env] = []
    slow: dict[str, Optimizer] = {}
    offload: bool = False
