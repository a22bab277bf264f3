"""What an environment shows and what it takes, as plain data: policies and trainers read it.

Observations travel and are stored as one array, in one of two forms::

    flat        float32 [..., D]         all parts are numbers: they stand in one vector
    structured  [...], a field for each  images, text, and the numbers as the field ``state``
                part of the observation

Leading dimensions are those of the batch, and slicing, stacking and concatenating are numpy's own
in both forms. Images stay uint8, and text is UTF-8 in a field of fixed size, until a policy
converts them on its device.

Actions are one array too: a column for each number of a Box and for each choice of the others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    ObservationArray = NDArray[Any]  # which form it is depends on the environment
else:
    ObservationArray = NDArray[np.float32 | np.void]
    """Observations: float32 ``[..., D]``, or structured ``[...]``; the wire refuses others."""

STATE: Final = "state"
"""The field that holds all numbers of a structured observation."""


class ObservationPart(msgspec.Struct, frozen=True, kw_only=True):
    """A field of an observation."""

    name: str
    kind: Literal["state", "image", "text"]
    shape: tuple[int, ...]
    """``[D]`` numbers, ``[height, width, channels]`` or ``[height, width]`` of pixels, or
    ``[bytes]``"""

    @property
    def dtype(self) -> type[np.float32 | np.uint8]:
        """The type of its elements."""
        return np.float32 if self.kind == "state" else np.uint8


class ObservationSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts of an observation; none while the environment has not been asked."""

    parts: tuple[ObservationPart, ...] = ()

    @property
    def flat(self) -> bool:
        """Whether the observation is one vector of numbers."""
        return len(self.parts) == 1 and self.parts[0].kind == "state"

    @property
    def state_size(self) -> int:
        """Numbers of the vector, or of the field ``state``; 0 where there is none."""
        return next((part.shape[0] for part in self.parts if part.kind == "state"), 0)

    def of_kind(self, kind: Literal["image", "text"]) -> tuple[ObservationPart, ...]:
        """The images, or the texts."""
        return tuple(part for part in self.parts if part.kind == kind)

    def empty(self, *batch: int) -> ObservationArray:
        """An array for ``batch`` observations, not filled."""
        if self.flat:
            return np.empty((*batch, self.state_size), np.float32)
        return np.empty(batch, [(part.name, part.dtype, part.shape) for part in self.parts])

    def __str__(self) -> str:
        return ", ".join(f"{part.kind} {part.name!r} {list(part.shape)}" for part in self.parts)


class Factor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of an action that has a distribution of its own."""

    kind: Literal["continuous", "choice"]
    size: int
    """number of values, or of choices"""

    @property
    def columns(self) -> int:
        """Columns that it takes in an array of actions."""
        return self.size if self.kind == "continuous" else 1

    def __str__(self) -> str:
        noun = "number" if self.kind == "continuous" else "choice"
        return f"{self.size} {noun}{'' if self.size == 1 else 's'}"


class ActionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The factors of an action; none while the environment has not been asked.

    One choice alone is an int64 array ``[N]``. Otherwise actions are ``[N, columns]``: int64 where
    all factors are choices, else float32, in which choices are whole numbers.
    """

    factors: tuple[Factor, ...] = ()

    @property
    def discrete(self) -> bool:
        """Whether the action is one choice alone."""
        return len(self.factors) == 1 and self.factors[0].kind == "choice"

    @property
    def continuous(self) -> bool:
        """Whether the action is one vector of numbers alone."""
        return len(self.factors) == 1 and self.factors[0].kind == "continuous"

    @property
    def numeric(self) -> bool:
        """Whether the action is numbers alone, of one vector or of several, side by side."""
        return bool(self.factors) and all(one.kind == "continuous" for one in self.factors)

    @property
    def numbers(self) -> int:
        """Numbers of all its vectors."""
        return sum(factor.size for factor in self.factors if factor.kind == "continuous")

    @property
    def columns(self) -> int:
        """Columns of an array of actions."""
        return sum(factor.columns for factor in self.factors)

    @property
    def outputs(self) -> int:
        """Outputs of a network: a mean for each number, a logit for each choice."""
        return sum(factor.size for factor in self.factors)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one action."""
        return () if self.discrete else (self.columns,)

    def __str__(self) -> str:
        return ", ".join(str(factor) for factor in self.factors)


class EnvSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Description of an environment for a policy."""

    observation: ObservationSpec
    action: ActionSpec
    max_episode_steps: int | None = None
    """time limit of episodes, where the environment has one"""
    bounds: tuple[tuple[float, float], ...] = ()
    """lowest and highest value of each column of an action, as a policy says it: -1 and 1 where the
    environment rescales it, 0 and the last of choices"""

    @property
    def observation_size(self) -> int:
        """``D``: numbers of an observation; 0 where it has none."""
        return self.observation.state_size

    @property
    def action_size(self) -> int:
        """``A``: values of a continuous action, or the number of choices; over all factors."""
        return self.action.outputs

    @property
    def discrete(self) -> bool:
        """Whether an action is one choice alone."""
        return self.action.discrete


def flat_spec(size: int) -> ObservationSpec:
    """Observations of ``size`` numbers."""
    return ObservationSpec((ObservationPart(name=STATE, kind="state", shape=(size,)),))


def continuous(size: int) -> ActionSpec:
    """Actions of ``size`` numbers."""
    return ActionSpec((Factor("continuous", size),))


def choices(*counts: int) -> ActionSpec:
    """Actions that choose once for each count."""
    return ActionSpec(tuple(Factor("choice", count) for count in counts))


def numbers_of(seen: Any) -> NDArray[np.float32] | None:
    """The numbers ``[..., D]`` of observations of either form; None where they have none."""
    names = seen.dtype.names
    if names is None:
        return np.asarray(seen)
    return seen[STATE] if STATE in names else None


def all_finite(numbers: NDArray[Any]) -> bool:
    """Whether none is NaN or infinite."""
    # numpy's quickest look at a few numbers; a product that overflows says nothing about them.
    return math.isfinite(np.vdot(numbers, numbers)) or bool(np.isfinite(numbers).all())


def texts_of(field: NDArray[np.uint8]) -> list[str]:
    """The texts of a field ``[N, bytes]``."""
    return [bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in field]
