"""Conversion of a policy's actions to those of an environment.

A policy's actions are one array: see `rlinf_async.messages.spaces`. Box, Discrete, MultiDiscrete
and MultiBinary are read column by column, Dict (in the sorted order of its keys) and Tuple part by
part. Whatever the numbers of an answer are, its actions lie in the space, in the space's dtype:
choices that are none, NaN and infinity are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.embodied import Choice
from rlinf_async.messages.spaces import ActionSpec, Factor, all_finite
from rlinf_async.workers.env.errors import EnvError

if TYPE_CHECKING:
    from gymnasium import Space, spaces

Actions = Sequence[Any] | NDArray[Any]
Read = Callable[[NDArray[Any]], Actions]
"""columns ``[E, columns]`` -> ``E`` actions"""

Bounds = Literal["clip", "rescale"]


class ActionReader:
    """Turns answers ``[E, columns]`` (or int64 ``[E]``) into ``E`` actions of one space."""

    def __init__(self, space: Space[Any], env: str, actions: Bounds) -> None:
        self._env = env
        factors, bounds, self._read = _reader(space, env, actions)
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
    space: Space[Any], env: str, actions: Bounds
) -> tuple[list[Factor], list[tuple[float, float]], Read]:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return _choosing(space, [int(space.n)], env)
    if isinstance(space, spaces.MultiDiscrete):
        return _choosing(space, [int(count) for count in space.nvec.reshape(-1)], env)
    if isinstance(space, spaces.MultiBinary):
        return _choosing(space, [2] * int(np.prod(space.shape)), env)
    if isinstance(space, spaces.Box):
        size = int(np.prod(space.shape))
        ends = [(-1.0, 1.0)] * size if actions == "rescale" else ends_of(space)
        return [Factor("continuous", size)], ends, _box(space, env, actions)
    if isinstance(space, spaces.Dict):
        keys: list[Any] = sorted(space.keys())
        return _composite(
            [space[key] for key in keys], env, actions, lambda p: dict(zip(keys, p, strict=True))
        )
    if isinstance(space, spaces.Tuple):
        return _composite(list(space), env, actions, tuple)
    raise EnvError(
        f"env {env}: the action space {space} is not supported; Box, Discrete, "
        "MultiDiscrete, MultiBinary, and Dict and Tuple of them are: wrap the environment "
        "(gymnasium.ActionWrapper)"
    )


def _composite(
    parts: list[Space[Any]], env: str, actions: Bounds, join: Callable[[tuple[Any, ...]], Any]
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
    space: spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary, counts: list[int], env: str
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
    space: spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary, counts: list[int], env: str
) -> Read:
    read, shape, dtype = _choices(counts, env), space.shape or (), space.dtype
    first = np.asarray(getattr(space, "start", 0)).reshape(-1).astype(np.int64)

    def integers(columns: NDArray[Any]) -> Actions:
        chosen = (read(columns) + first).astype(dtype)
        actions: NDArray[Any] = chosen.reshape(len(chosen), *shape)
        return actions

    return integers


def _box(space: spaces.Box, env: str, actions: Bounds) -> Read:
    low, high, shape = space.low.reshape(-1), space.high.reshape(-1), space.shape
    within = _within(low, high)

    def clip(columns: NDArray[Any]) -> Actions:
        vectors = within(columns)
        if not shape:  # a row of an array would be a scalar, which a Box does not contain
            return [np.asarray(vector[0]) for vector in vectors]
        return vectors if len(shape) == 1 else vectors.reshape(len(vectors), *shape)

    if actions == "clip":
        return clip
    if not space.is_bounded("both"):
        raise EnvError(
            f"env {env}: actions = 'rescale' needs finite bounds, the action space has "
            f"low {low.tolist()}, high {high.tolist()}: use actions = 'clip'"
        )
    middle, half = _middle_and_half(space)
    return lambda columns: clip(middle + np.clip(columns, -1.0, 1.0) * half)


def ends_of(space: spaces.Box) -> list[tuple[float, float]]:
    """Lowest and highest of each number, none of them infinite."""
    low: NDArray[Any] = space.low.reshape(-1)
    high: NDArray[Any] = space.high.reshape(-1)
    if low.dtype.kind == "f":
        finite = np.finfo(low.dtype)
        low, high = np.maximum(low, finite.min), np.minimum(high, finite.max)
    return [(float(one), float(other)) for one, other in zip(low, high, strict=True)]


def answer_for(
    space: Space[Any],
    action: NDArray[Any],
    bounds: Sequence[tuple[float, float]],
    *,
    rescaled: bool,
) -> Choice:
    """The answer of a policy, of one row, by which this action of a Box or Discrete space is taken;
    of one outside of the space, the nearest within."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return np.array([int(action) - int(space.start)], np.int64)
    assert isinstance(space, spaces.Box)
    middle, half = _middle_and_half(space)
    flat = action.reshape(-1).astype(middle.dtype)
    if rescaled:
        flat = np.divide(flat - middle, half, out=np.zeros_like(flat), where=half > 0)
    answer: Choice = np.clip(flat, *np.array(bounds, middle.dtype).T)[None].astype(np.float32)
    return answer


def _middle_and_half(space: spaces.Box) -> tuple[NDArray[Any], NDArray[Any]]:
    """The middle of the bounds, and half their distance, flat.

    -1 of ``actions = "rescale"`` is ``middle - half``, 1 is ``middle + half``.
    """
    wide = _wide(space.low.dtype)
    low, high = (0.5 * bound.reshape(-1).astype(wide) for bound in (space.low, space.high))
    return low + high, high - low


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which numbers are compared with bounds of ``dtype``: it holds floating ones."""
    return np.promote_types(dtype, np.float32) if dtype.kind == "f" else np.dtype(np.float64)


def _within(low: NDArray[Any], high: NDArray[Any]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return the function that makes of any finite numbers those of the bounds' dtype which are
    nearest and lie within the bounds."""
    dtype, wide = low.dtype, _wide(low.dtype)
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
