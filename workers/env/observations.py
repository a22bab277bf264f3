"""Conversion of an environment's observations to rows of one array.

All numbers stand in one vector: of a Dict in the sorted order of its keys (so a goal environment's
row is ``achieved_goal, desired_goal, observation``), a choice one-hot, anything else as it is. If
there are images (uint8 boxes of two or more dimensions) or texts too, an observation is structured:
the numbers are its field ``state``, images and texts are fields of their own, called by their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.spaces import STATE, ObservationSpec, Part
from rlinf_async.workers.env.errors import EnvError

if TYPE_CHECKING:
    from gymnasium import Space

Fill = Callable[[Any, NDArray[Any]], None]
"""``(observation, place)``: fills the place. Raises `ValueError` for another shape."""

Path = tuple[Any, ...]
"""keys and indices that lead to a part of an observation"""


class _Leaf(msgspec.Struct, frozen=True):
    path: Path
    kind: str
    shape: tuple[int, ...]
    fill: Fill
    whole: tuple[int, ...] | None = None
    """shape that is copied as it is, for many environments at a time; None: one by one"""


class ObservationWriter:
    """Writes observations of one space into rows of arrays that ``spec`` makes."""

    def __init__(self, space: Space[Any], env: str) -> None:
        leaves = list(_leaves(space, (), env))
        numbers = [leaf for leaf in leaves if leaf.kind == "state"]
        others = [leaf for leaf in leaves if leaf.kind != "state"]
        self.size = sum(leaf.shape[0] for leaf in numbers)
        """numbers of an observation: ``D``"""
        named = [(_name(leaf, others), leaf) for leaf in others]
        state = [Part(name=STATE, kind="state", shape=(self.size,))] if self.size else []
        parts = [_part(name, leaf) for name, leaf in named]
        self.spec = ObservationSpec((*state, *parts))
        if not self.spec.parts:
            raise EnvError(f"env {env}: the observation space {space} is empty")
        self._state, self._named = _placed(numbers), named
        self._vector = vector = _vector(numbers)
        self.write: Callable[[Any, Any], None] = self._write if others else vector
        """``(observation, row)``: fills the row; raises `ValueError` for another shape"""

    def write_all(self, observations: Any, rows: Any) -> None:
        """Fill rows with the observations of many environments, which stand in one array each.

        Raises:
            ValueError: for another shape.
        """
        for place, leaf in self._state:
            target = rows[:, place] if rows.dtype.names is None else rows[STATE][:, place]
            _fill_all(_at(observations, leaf.path), target, leaf)
        for name, leaf in self._named:
            _fill_all(_at(observations, leaf.path), rows[name], leaf)

    def _write(self, observation: Any, row: Any) -> None:
        if self.size:
            self._vector(observation, row[STATE])
        for name, leaf in self._named:
            leaf.fill(_at(observation, leaf.path), row[name])


def _leaves(space: Space[Any], path: Path, env: str) -> Iterator[_Leaf]:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        for key in sorted(space.keys()):
            yield from _leaves(space[key], (*path, key), env)
    elif isinstance(space, spaces.Tuple):
        for at, part in enumerate(space):
            yield from _leaves(part, (*path, at), env)
    elif isinstance(space, spaces.Discrete):
        yield _Leaf(path, "state", (int(space.n),), _one_hot(int(space.start)))
    elif isinstance(space, spaces.MultiDiscrete):
        counts, first = space.nvec.reshape(-1), space.start.reshape(-1)
        yield _Leaf(path, "state", (int(counts.sum()),), _one_hots(counts, first, space.shape))
    elif isinstance(space, spaces.Text):
        size = space.max_length * (1 if "".join(space.characters).isascii() else 4)
        yield _Leaf(path, "text", (size,), _characters)
    elif isinstance(space, (spaces.Box, spaces.MultiBinary)) and space.shape is not None:
        if isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) > 1:
            yield _Leaf(path, "image", space.shape, _pixels(space.shape), space.shape)
        else:
            size = int(np.prod(space.shape))
            yield _Leaf(path, "state", (size,), _elements(space.shape), space.shape)
    else:
        raise EnvError(
            f"env {env}: the observation space {space} is not supported; Box, Discrete, "
            "MultiDiscrete, MultiBinary, Text, and Dict and Tuple of them are: wrap the "
            "environment (gymnasium.ObservationWrapper)"
        )


def _part(name: str, leaf: _Leaf) -> Part:
    return Part(name=name, kind="text" if leaf.kind == "text" else "image", shape=leaf.shape)


def _name(leaf: _Leaf, others: list[_Leaf]) -> str:
    """Its last key where that is enough, else all of them; ``state`` is taken by the numbers."""
    last = str(leaf.path[-1]) if leaf.path else leaf.kind
    alone = sum(other.path[-1:] == leaf.path[-1:] for other in others) == 1
    name = last if alone else ".".join(str(key) for key in leaf.path)
    return f"{name}.{leaf.kind}" if name == STATE else name


def _at(observation: Any, path: Path) -> Any:
    for key in path:
        observation = observation[key]
    return observation


def _placed(leaves: list[_Leaf]) -> list[tuple[slice, _Leaf]]:
    """Where the numbers of each part stand in the vector."""
    ends = np.cumsum([leaf.shape[0] for leaf in leaves]).tolist()
    return [(slice(end - leaf.shape[0], end), leaf) for end, leaf in zip(ends, leaves, strict=True)]


def _fill_all(batch: Any, target: NDArray[Any], leaf: _Leaf) -> None:
    if len(batch) != len(target):
        raise ValueError(f"observations of {len(batch)} environments, there are {len(target)}")
    if leaf.whole is None:
        for one, place in zip(batch, target, strict=True):
            leaf.fill(one, place)
        return
    values = array_of(batch)
    if values.shape[1:] != leaf.whole or (leaf.kind == "image" and values.dtype != np.uint8):
        raise ValueError(
            f"observations of shape {values.shape} and dtype {values.dtype}, the space of one has "
            f"{leaf.whole}"
        )
    target[...] = values.reshape(target.shape)


def array_of(values: Any) -> NDArray[Any]:
    """An array of numpy, also of a tensor on any device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    return np.asarray(values)


def _vector(leaves: list[_Leaf]) -> Fill:
    """Fill a vector with all numbers."""
    if len(leaves) == 1 and not leaves[0].path:
        return leaves[0].fill
    placed = [(leaf.path, place, leaf.fill) for place, leaf in _placed(leaves)]

    def write(observation: Any, row: NDArray[Any]) -> None:
        for path, place, fill in placed:
            fill(_at(observation, path), row[place])

    return write


def _elements(shape: tuple[int, ...]) -> Fill:
    def write(observation: Any, row: NDArray[Any]) -> None:
        values = np.asarray(observation)
        if values.shape != shape:  # numpy would broadcast it in silence
            raise ValueError(f"an observation of shape {values.shape}, the space has {shape}")
        row[:] = values if len(shape) == 1 else values.reshape(-1)

    return write


def _one_hot(first: int) -> Fill:
    def write(observation: Any, row: NDArray[Any]) -> None:
        choice = int(observation) - first
        if not 0 <= choice < len(row):
            raise ValueError(
                f"observation {observation}, the space has {first} to {first + len(row) - 1}"
            )
        row[:] = 0.0
        row[choice] = 1.0

    return write


def _one_hots(counts: NDArray[Any], first: NDArray[Any], shape: tuple[int, ...]) -> Fill:
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))

    def write(observation: Any, row: NDArray[Any]) -> None:
        values = np.asarray(observation)
        if values.shape != shape:
            raise ValueError(f"an observation of shape {values.shape}, the space has {shape}")
        chosen = values.reshape(-1) - first
        if ((chosen < 0) | (chosen >= counts)).any():
            raise ValueError(f"observation {observation}, the space has {counts} choices")
        row[:] = 0.0
        row[starts + chosen] = 1.0

    return write


def _pixels(shape: tuple[int, ...]) -> Fill:
    def write(observation: Any, place: NDArray[Any]) -> None:
        values = np.asarray(observation)
        if values.shape != shape or values.dtype != np.uint8:
            raise ValueError(
                f"an image of shape {values.shape} and dtype {values.dtype}, the space has "
                f"{shape} and uint8"
            )
        place[...] = values

    return write


def _characters(observation: Any, place: NDArray[Any]) -> None:
    text = str(observation).encode()
    if len(text) > len(place):
        raise ValueError(f"a text of {len(text)} bytes, the space has at most {len(place)}")
    place[:] = 0
    place[: len(text)] = np.frombuffer(text, np.uint8)
