"""Conversion of observations to rows of float32, and of the policy's actions to the environment's.

Observations are flattened: a Dict in the sorted order of its keys (so a goal environment's row is
``achieved_goal, desired_goal, observation``), a Discrete one-hot, anything else as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.embodied import Choice, Floats
from rlinf_async.workers.env.errors import EnvError

if TYPE_CHECKING:
    from gymnasium import Space

Write = Callable[[Any, Floats], None]
"""``(observation, row [D])``: fills the row. Raises `ValueError` for another shape."""


class EnvSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of an environment's spaces, which a policy needs."""

    observation_size: int
    """``D``"""
    action_size: int
    """``A``: values of a continuous action, or the number of discrete ones"""
    discrete: bool
    max_episode_steps: int | None = None
    """time limit of episodes, where the environment has one"""


class ObservationWriter:
    """Writes observations of one space into rows. ``size`` is ``D``."""

    def __init__(self, space: Space[Any], env: str) -> None:
        self.size, self.write = _writer(space, env)


class ActionReader:
    """Turns answers ``[E, A]`` (or int64 ``[E]``) into ``E`` actions of one space."""

    def __init__(self, space: Space[Any], env: str, actions: Literal["clip", "rescale"]) -> None:
        from gymnasium import spaces

        self._env = env
        self.discrete = isinstance(space, spaces.Discrete)
        if isinstance(space, spaces.Discrete):
            self.size, self._first = int(space.n), int(space.start)
        elif isinstance(space, spaces.Box) and space.dtype is not None:
            self._shape, self._dtype = space.shape, space.dtype
            self._low = space.low.reshape(-1).astype(np.float32)
            self._high = space.high.reshape(-1).astype(np.float32)
            self.size = self._low.size
            self._rescale = actions == "rescale"
            self._check_bounds()
        else:
            raise EnvError(
                f"env {env}: the action space {space} is not supported; Box and Discrete are: wrap "
                "the environment (gymnasium.ActionWrapper)"
            )

    def read(self, answer: Choice | None, count: int) -> Sequence[Any] | NDArray[Any]:
        """The actions of ``count`` environments.

        Raises:
            EnvError: the answer's shape or values do not fit the action space.
        """
        expected = (count,) if self.discrete else (count, self.size)
        if answer is None or answer.shape != expected:
            raise EnvError(
                f"env {self._env}: the policy answered "
                f"{'no actions' if answer is None else f'actions of shape {list(answer.shape)}'}, "
                f"but {count} environments take {list(expected)}; the policy needs action_size = "
                f"{self.size}, {'discrete' if self.discrete else 'continuous'}"
            )
        return self._choices(answer) if self.discrete else self._vectors(answer)

    def _choices(self, answer: Choice) -> list[int]:
        chosen: list[int] = answer.tolist()
        if not all(0 <= choice < self.size for choice in chosen):
            raise EnvError(
                f"env {self._env}: the policy chose {chosen}; choices are 0 to {self.size - 1}"
            )
        return [choice + self._first for choice in chosen]

    def _vectors(self, answer: Choice) -> NDArray[Any]:
        bounded: NDArray[Any]
        if self._rescale:
            share = (np.clip(answer, -1.0, 1.0).astype(np.float32) + 1.0) * 0.5
            bounded = self._low + share * (self._high - self._low)
        else:
            bounded = np.minimum(np.maximum(answer, self._low), self._high)
        vectors = bounded.astype(self._dtype, copy=False)
        return vectors if len(self._shape) == 1 else vectors.reshape(len(vectors), *self._shape)

    def _check_bounds(self) -> None:
        if self._rescale and not np.isfinite(self._high - self._low).all():
            raise EnvError(
                f"env {self._env}: actions = 'rescale' needs finite bounds, the action space has "
                f"low {self._low.tolist()}, high {self._high.tolist()}: use actions = 'clip'"
            )


def _writer(space: Space[Any], env: str) -> tuple[int, Write]:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return _parts([(key, *_writer(space[key], env)) for key in sorted(space.keys())])
    if isinstance(space, spaces.Tuple):
        return _parts([(at, *_writer(part, env)) for at, part in enumerate(space)])
    if isinstance(space, spaces.Discrete):
        return int(space.n), _one_hot(int(space.start))
    if isinstance(space, (spaces.Box, spaces.MultiBinary)) and space.shape is not None:
        return int(np.prod(space.shape)), _elements(space.shape)
    raise EnvError(
        f"env {env}: the observation space {space} is not supported; Box, Discrete, MultiBinary, "
        "and Dict and Tuple of them are: wrap the environment (gymnasium.ObservationWrapper)"
    )


def _elements(shape: tuple[int, ...]) -> Write:
    def write(observation: Any, row: Floats) -> None:
        values = np.asarray(observation)
        if values.shape != shape:  # numpy would broadcast it in silence
            raise ValueError(f"an observation of shape {values.shape}, the space has {shape}")
        row[:] = values if len(shape) == 1 else values.reshape(-1)

    return write


def _one_hot(first: int) -> Write:
    def write(observation: Any, row: Floats) -> None:
        choice = int(observation) - first
        if not 0 <= choice < len(row):
            raise ValueError(
                f"observation {observation}, the space has {first} to {first + len(row) - 1}"
            )
        row[:] = 0.0
        row[choice] = 1.0

    return write


def _parts(parts: Sequence[tuple[Any, int, Write]]) -> tuple[int, Write]:
    placed: list[tuple[Any, slice, Write]] = []
    size = 0
    for key, length, write_part in parts:
        placed.append((key, slice(size, size + length), write_part))
        size += length

    def write(observation: Any, row: Floats) -> None:
        for key, place, write_part in placed:
            write_part(observation[key], row[place])

    return size, write
