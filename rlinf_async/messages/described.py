"""Spaces of an environment as plain data: what `rlinf_async.messages.converting` reads, and what a
policy takes along to where its environment, and Gymnasium, are not installed.

::

    Space = BoxSpace | DiscreteSpace | MultiDiscreteSpace | MultiBinarySpace | TextSpace
          | DictSpace | TupleSpace
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import gymnasium

Key: TypeAlias = str | int
Number: TypeAlias = int | float | None
"""bound of a Box; None where there is none"""


class EnvError(RuntimeError):
    """The environment cannot be used: its spaces, or what was answered for them, do not fit."""


class BoxSpace(msgspec.Struct, frozen=True, tag="box", forbid_unknown_fields=True):
    """Numbers within bounds. A bound is one number for all, or one for each in row-major order."""

    shape: tuple[int, ...]
    dtype: str
    low: Number | tuple[Number, ...] = None
    high: Number | tuple[Number, ...] = None

    @property
    def size(self) -> int:
        """Numbers of it."""
        return math.prod(self.shape)

    @property
    def ends(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Lowest and highest value of each number, flat, in the space's dtype."""
        return _filled(self.low, -math.inf, self), _filled(self.high, math.inf, self)


class DiscreteSpace(msgspec.Struct, frozen=True, tag="discrete", forbid_unknown_fields=True):
    """One of ``n`` whole numbers, of which ``start`` is the first."""

    n: int
    start: int = 0
    dtype: str = "int64"


class MultiDiscreteSpace(
    msgspec.Struct, frozen=True, tag="multi_discrete", forbid_unknown_fields=True
):
    """Choices of ``counts`` numbers each, of which ``starts`` are the first; in row-major order."""

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    dtype: str = "int64"


class MultiBinarySpace(msgspec.Struct, frozen=True, tag="multi_binary", forbid_unknown_fields=True):
    """Choices of 0 or 1."""

    shape: tuple[int, ...]
    dtype: str = "int8"


class TextSpace(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    """Text of at most ``size`` bytes of UTF-8."""

    size: int


class DictSpace(msgspec.Struct, frozen=True, tag="dict", forbid_unknown_fields=True):
    """Spaces by key, in the sorted order of the keys."""

    parts: tuple[tuple[Key, Space], ...]


class TupleSpace(msgspec.Struct, frozen=True, tag="tuple", forbid_unknown_fields=True):
    """Spaces one after the other."""

    parts: tuple[Space, ...]


Space: TypeAlias = Union[
    "BoxSpace",
    "DiscreteSpace",
    "MultiDiscreteSpace",
    "MultiBinarySpace",
    "TextSpace",
    "DictSpace",
    "TupleSpace",
]
KINDS = (
    *(BoxSpace, DiscreteSpace, MultiDiscreteSpace, MultiBinarySpace, TextSpace),
    *(DictSpace, TupleSpace),
)


class Spaces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Both spaces of an environment, as a policy meets them: an action of ``k`` in a chunk is a Box
    ``[k, A]``."""

    observation: Space
    action: Space


def described(
    space: gymnasium.Space[Any] | Space, env: str, of: Literal["action", "observation"]
) -> Space:
    """Return a space of Gymnasium as plain data; what is plain data stays as it is.

    Raises:
        EnvError: no policy can have a space of this kind; ``env`` is the environment's name.
    """
    if isinstance(space, KINDS):
        return space
    from gymnasium import spaces

    dtype = str(getattr(space, "dtype", None))
    if isinstance(space, spaces.Dict):
        keys: list[Any] = sorted(space.keys())
        return DictSpace(tuple((key, described(space[key], env, of)) for key in keys))
    if isinstance(space, spaces.Tuple):
        return TupleSpace(tuple(described(part, env, of) for part in space))
    if isinstance(space, spaces.Discrete):
        return DiscreteSpace(int(space.n), int(space.start), dtype)
    if isinstance(space, spaces.MultiDiscrete):
        counts, starts = (one.reshape(-1).tolist() for one in (space.nvec, space.start))
        return MultiDiscreteSpace(space.shape, tuple(counts), tuple(starts), dtype)
    if isinstance(space, spaces.MultiBinary) and space.shape is not None:
        return MultiBinarySpace(space.shape, dtype)
    if isinstance(space, spaces.Box):
        return BoxSpace(space.shape, dtype, _bound(space.low), _bound(space.high))
    if isinstance(space, spaces.Text) and of == "observation":
        return TextSpace(space.max_length * (1 if "".join(space.characters).isascii() else 4))
    text, wrapper = (", Text", "Observation") if of == "observation" else ("", "Action")
    raise EnvError(
        f"env {env}: the {of} space {space} is not supported; Box, Discrete, "
        f"MultiDiscrete, MultiBinary{text}, and Dict and Tuple of them are: wrap the environment "
        f"(gymnasium.{wrapper}Wrapper)"
    )


def leaves(space: Space) -> Iterator[Space]:
    """The spaces of which Dicts and Tuples are made, in their order."""
    if isinstance(space, DictSpace):
        for _, part in space.parts:
            yield from leaves(part)
    elif isinstance(space, TupleSpace):
        for part in space.parts:
            yield from leaves(part)
    else:
        yield space


def zero_of(space: Space) -> Any:
    """Return an observation or action of this space: zeros, or what is nearest to them."""
    match space:
        case BoxSpace():
            zeros = np.clip(np.zeros(space.size, space.dtype), *space.ends)
            return zeros.astype(space.dtype).reshape(space.shape)
        case DiscreteSpace():
            return space.start
        case MultiDiscreteSpace():
            return np.array(space.starts, space.dtype).reshape(space.shape)
        case MultiBinarySpace():
            return np.zeros(space.shape, space.dtype)
        case TextSpace():
            return ""
        case DictSpace():
            return {key: zero_of(part) for key, part in space.parts}
        case TupleSpace():
            return tuple(zero_of(part) for part in space.parts)


def _bound(bound: NDArray[Any]) -> Number | tuple[Number, ...]:
    flat = bound.reshape(-1)
    if flat.dtype == np.bool_:
        flat = flat.astype(np.int64)
    numbers = tuple(None if math.isinf(one) else one for one in flat.tolist())
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _filled(bound: Number | tuple[Number, ...], none: float, box: BoxSpace) -> NDArray[Any]:
    each = bound if isinstance(bound, tuple) else (bound,) * box.size
    if len(each) != box.size:
        raise ValueError(f"{len(each)} bounds of {box.size} numbers")
    return np.array([none if one is None else one for one in each], box.dtype)
