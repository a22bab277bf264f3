"""Conversion of actions of a policy to those of an environment, and of what that shows to rows.

A policy's actions are one array: see `rlinf_async.messages.spaces`. Box, Discrete, MultiDiscrete
and MultiBinary are read column by column, Dict (in the sorted order of its keys) and Tuple part by
part. Whatever the numbers of an answer are, its actions lie in the space, in the space's dtype:
choices that are none, NaN and infinity are errors.

All numbers of an observation stand in one vector: of a Dict in the sorted order of its keys (so a
goal environment's row is ``achieved_goal, desired_goal, observation``), a choice one-hot, anything
else as it is. If there are images (uint8 boxes of two or more dimensions) or texts too, an
observation is structured: the numbers are its field ``state``, images and texts are fields of
their own, called by their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.described import (
    BoxSpace,
    DictSpace,
    DiscreteSpace,
    EnvError,
    MultiBinarySpace,
    MultiDiscreteSpace,
    Space,
    TextSpace,
    TupleSpace,
    described,
)
from rlinf_async.messages.embodied import Choice
from rlinf_async.messages.spaces import (
    STATE,
    ActionSpec,
    Factor,
    ObservationPart,
    ObservationSpec,
    all_finite,
)

if TYPE_CHECKING:
    import gymnasium

    AnySpace = gymnasium.Space[Any] | Space

Actions = Sequence[Any] | NDArray[Any]
Read = Callable[[NDArray[Any]], Actions]
"""columns ``[E, columns]`` -> ``E`` actions"""

Bounds = Literal["clip", "rescale"]


class ActionReader:
    """Turns answers ``[E, columns]`` (or int64 ``[E]``) into ``E`` actions of one space."""

    def __init__(self, space: AnySpace, env: str, actions: Bounds) -> None:
        self._env = env
        factors, bounds, self._read = _reader(described(space, env, "action"), env, actions)
        self.bounds = tuple(bounds)
        """lowest and highest value of each column of an answer; those of a Box without bounds are
        the largest of its dtype"""
        self.spec = ActionSpec(tuple(factors))
        self.discrete = self.spec.discrete
        self.size = self.spec.outputs

    def read(self, answer: Choice | None, count: int) -> Actions:
        """The actions of ``count`` environments.

        Raises:
            EnvError: the answer's shape or values do not fit the action space.
        """
        answer = self.checked(answer, count)
        return self._read(answer[:, None] if self.discrete else answer)

    def checked(self, answer: Choice | None, count: int) -> Choice:
        """The answer as it is, if it has the shape of ``count`` actions, and finite numbers.

        Raises:
            EnvError: it has not.
        """
        expected = (count, *self.spec.shape)
        if answer is None or answer.shape != expected:
            raise EnvError(
                f"env {self._env}: the policy answered "
                f"{'no actions' if answer is None else f'actions of shape {list(answer.shape)}'}, "
                f"but {count} environments take {list(expected)}; the policy needs action_size = "
                f"{self.size}, {self._kind}"
            )
        if not all_finite(answer):
            row = np.flatnonzero(~np.isfinite(answer).reshape(count, -1).all(-1))[0]
            raise EnvError(
                f"env {self._env}: the policy answered actions with NaN or infinity, the first "
                f"{answer[row].tolist()}, in row {row} of {count}"
            )
        return answer

    @property
    def _kind(self) -> str:
        if self.discrete:
            return "discrete"
        return "continuous" if self.spec.continuous else "in several factors"


def _reader(
    space: Space, env: str, actions: Bounds
) -> tuple[list[Factor], list[tuple[float, float]], Read]:
    match space:
        case DiscreteSpace():
            return _choosing(space, [space.n], env)
        case MultiDiscreteSpace():
            return _choosing(space, list(space.counts), env)
        case MultiBinarySpace():
            return _choosing(space, [2] * int(np.prod(space.shape)), env)
        case BoxSpace():
            ends = [(-1.0, 1.0)] * space.size if actions == "rescale" else ends_of(space)
            return [Factor("continuous", space.size)], ends, _box(space, env, actions)
        case DictSpace():
            keys = [key for key, _ in space.parts]
            return _composite(
                [part for _, part in space.parts],
                env,
                actions,
                lambda p: dict(zip(keys, p, strict=True)),
            )
        case TupleSpace():
            return _composite(list(space.parts), env, actions, tuple)
        case TextSpace():
            raise EnvError(f"env {env}: no policy says texts")


def _composite(
    parts: list[Space], env: str, actions: Bounds, join: Callable[[tuple[Any, ...]], Any]
) -> tuple[list[Factor], list[tuple[float, float]], Read]:
    factors: list[Factor] = []
    bounds: list[tuple[float, float]] = []
    placed: list[tuple[slice, Read]] = []
    start = 0
    for part in parts:
        own, ends, read = _reader(part, env, actions)
        end = start + sum(factor.columns for factor in own)
        placed.append((slice(start, end), read))
        factors += own
        bounds += ends
        start = end

    def read_all(columns: NDArray[Any]) -> Actions:
        each = [read(columns[:, place]) for place, read in placed]
        return [join(values) for values in zip(*each, strict=True)]

    return factors, bounds, read_all


def _choosing(
    space: DiscreteSpace | MultiDiscreteSpace | MultiBinarySpace, counts: list[int], env: str
) -> tuple[list[Factor], list[tuple[float, float]], Read]:
    factors = [Factor("choice", count) for count in counts]
    return factors, [(0.0, count - 1.0) for count in counts], _integers(space, counts, env)


def _choices(counts: list[int], env: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    limits = np.array(counts)

    def read(columns: NDArray[Any]) -> NDArray[Any]:
        if ((columns < 0) | (columns >= limits) | (columns != np.floor(columns))).any():
            until = " and ".join(str(limit - 1) for limit in sorted(set(counts)))
            raise EnvError(
                f"env {env}: the policy chose {_listed(columns)}; choices are 0 to {until}"
            )
        return columns.astype(np.int64)

    return read


def _listed(chosen: NDArray[Any]) -> list[Any]:
    listed: list[Any] = (chosen[:, 0] if chosen.shape[1] == 1 else chosen).tolist()
    return listed


def _integers(
    space: DiscreteSpace | MultiDiscreteSpace | MultiBinarySpace, counts: list[int], env: str
) -> Read:
    read, dtype = _choices(counts, env), space.dtype
    shape = () if isinstance(space, DiscreteSpace) else space.shape
    first = np.array(_first(space), np.int64)

    def integers(columns: NDArray[Any]) -> Actions:
        chosen = (read(columns) + first).astype(dtype)
        actions: NDArray[Any] = chosen.reshape(len(chosen), *shape)
        return actions

    return integers


def _first(space: DiscreteSpace | MultiDiscreteSpace | MultiBinarySpace) -> tuple[int, ...]:
    """The first of each choice, or of all."""
    if isinstance(space, MultiDiscreteSpace):
        return space.starts
    return (space.start,) if isinstance(space, DiscreteSpace) else (0,)


def _box(space: BoxSpace, env: str, actions: Bounds) -> Read:
    (low, high), shape = space.ends, space.shape
    within = _within(low, high)

    def clip(columns: NDArray[Any]) -> Actions:
        vectors = within(columns)
        if not shape:  # a row of an array would be a scalar, which a Box does not contain
            return [np.asarray(vector[0]) for vector in vectors]
        return vectors if len(shape) == 1 else vectors.reshape(len(vectors), *shape)

    if actions == "clip":
        return clip
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise EnvError(
            f"env {env}: actions = 'rescale' needs finite bounds, the action space has "
            f"low {low.tolist()}, high {high.tolist()}: use actions = 'clip'"
        )
    middle, half = middle_and_half(space)
    return lambda columns: clip(middle + np.clip(columns, -1.0, 1.0) * half)


def ends_of(space: AnySpace) -> list[tuple[float, float]]:
    """Return the lowest and highest value of each number of a Box, none of them infinite."""
    low, high = _as_box(space).ends
    if low.dtype.kind == "f":
        finite = np.finfo(low.dtype)
        low, high = np.maximum(low, finite.min), np.minimum(high, finite.max)
    return [(float(one), float(other)) for one, other in zip(low, high, strict=True)]


def answer_for(
    space: AnySpace,
    action: NDArray[Any],
    bounds: Sequence[tuple[float, float]],
    *,
    rescaled: bool,
) -> Choice:
    """The answer of a policy, of one row, by which this action of a Box or Discrete space is taken;
    of one outside of the space, the nearest within."""
    known = described(space, "", "action")
    if isinstance(known, DiscreteSpace):
        return np.array([int(action) - known.start], np.int64)
    middle, half = middle_and_half(_as_box(known))
    flat = action.reshape(-1).astype(middle.dtype)
    if rescaled:
        flat = np.divide(flat - middle, half, out=np.zeros_like(flat), where=half > 0)
    answer: Choice = np.clip(flat, *np.array(bounds, middle.dtype).T)[None].astype(np.float32)
    return answer


def _as_box(space: AnySpace) -> BoxSpace:
    box = described(space, "", "action")
    assert isinstance(box, BoxSpace)
    return box


def middle_and_half(space: BoxSpace) -> tuple[NDArray[Any], NDArray[Any]]:
    """The middle of the bounds, and half their distance, flat.

    -1 of ``actions = "rescale"`` is ``middle - half``, 1 is ``middle + half``.
    """
    low, high = space.ends
    wide = _comparison_dtype(low.dtype)
    low, high = (0.5 * bound.astype(wide) for bound in (low, high))
    return low + high, high - low


def _comparison_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which numbers are compared with bounds of ``dtype``: it holds floating ones."""
    return np.promote_types(dtype, np.float32) if dtype.kind == "f" else np.dtype(np.float64)


def _within(low: NDArray[Any], high: NDArray[Any]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return the function that makes of any finite numbers those of the bounds' dtype which are
    nearest and lie within the bounds."""
    dtype, wide = low.dtype, _comparison_dtype(low.dtype)
    if dtype.kind == "f":
        # No number becomes infinite; and as the bounds are numbers of the dtype, rounding to it
        # leads none beyond them.
        least = np.maximum(low, np.finfo(dtype).min).astype(wide)
        most = np.minimum(high, np.finfo(dtype).max).astype(wide)
        return lambda columns: np.minimum(np.maximum(columns, least), most).astype(
            dtype, copy=False
        )
    # A bound such as 2**63 - 1 is no float64: what reaches the nearest one gets the bound itself.
    least, most = low.astype(wide), high.astype(wide)

    def integers(columns: NDArray[Any]) -> NDArray[Any]:
        nearest = np.rint(columns.astype(wide))
        below, above = nearest <= least, nearest >= most
        inside = np.where(below | above, 0.0, nearest).astype(dtype)
        return np.where(above, high, np.where(below, low, inside))

    return integers


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

    def __init__(self, space: AnySpace, env: str) -> None:
        leaves = list(_leaves(described(space, env, "observation"), ()))
        numbers = [leaf for leaf in leaves if leaf.kind == "state"]
        others = [leaf for leaf in leaves if leaf.kind != "state"]
        self.size = sum(leaf.shape[0] for leaf in numbers)
        """numbers of an observation: ``D``"""
        named = [(_name(leaf, others), leaf) for leaf in others]
        state = [ObservationPart(name=STATE, kind="state", shape=(self.size,))] if self.size else []
        parts = [_part(name, leaf) for name, leaf in named]
        self.spec = ObservationSpec((*state, *parts))
        if not self.spec.parts:
            raise EnvError(f"env {env}: the observation space {space} is empty")
        self._state, self._named = _placed(numbers), named
        self._vector = vector = _vector(numbers)
        self.write: Callable[[Any, Any], None] = self._write if others else vector
        """``(observation, row)``: fills the row; raises `ValueError` for another shape"""

    def place_of(self, key: Any) -> slice | None:
        """Return where the numbers of this part of a Dict stand; None: it has none, or parts."""
        return next((place for place, leaf in self._state if leaf.path == (key,)), None)

    def misfit(self, observation: Any) -> str:
        """Why this cannot be written, with the name of the part; empty if it can."""
        for leaf in (*(one for _, one in self._state), *(one for _, one in self._named)):
            name = ".".join(str(key) for key in leaf.path)
            try:
                value = _at(observation, leaf.path)
            except (KeyError, IndexError, TypeError):
                return f"an observation without {name!r}"
            place = np.empty(leaf.shape, np.float32 if leaf.kind == "state" else np.uint8)
            try:
                leaf.fill(value, place)
            except (ValueError, TypeError) as error:
                return f"{name!r}: {error}" if name else str(error)
        return ""

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


def _leaves(space: Space, path: Path) -> Iterator[_Leaf]:
    match space:
        case DictSpace():
            for key, part in space.parts:
                yield from _leaves(part, (*path, key))
        case TupleSpace():
            for at, part in enumerate(space.parts):
                yield from _leaves(part, (*path, at))
        case DiscreteSpace():
            yield _Leaf(path, "state", (space.n,), _one_hot(space.start))
        case MultiDiscreteSpace():
            counts, first = np.array(space.counts), np.array(space.starts)
            yield _Leaf(path, "state", (int(counts.sum()),), _one_hots(counts, first, space.shape))
        case TextSpace():
            yield _Leaf(path, "text", (space.size,), _characters)
        case BoxSpace() if space.dtype == "uint8" and len(space.shape) > 1:
            yield _Leaf(path, "image", space.shape, _pixels(space.shape), space.shape)
        case BoxSpace() | MultiBinarySpace():
            size = int(np.prod(space.shape))
            yield _Leaf(path, "state", (size,), _elements(space.shape), space.shape)


def _part(name: str, leaf: _Leaf) -> ObservationPart:
    return ObservationPart(
        name=name, kind="text" if leaf.kind == "text" else "image", shape=leaf.shape
    )


def _name(leaf: _Leaf, others: list[_Leaf]) -> str:
    """Return a leaf's last key where that is enough, else its whole path; ``state`` is taken by the
    numbers."""
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
