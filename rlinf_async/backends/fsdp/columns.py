"""Columns of an iteration: the same field of all trajectories, as one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.embodied import Bools, Trajectory


def side_by_side(ordered: Sequence[Trajectory], field: str) -> NDArray[Any]:
    """The envs of all stages as columns of one array: [T, E, ...] each -> [T, sum E, ...]."""
    return np.concatenate([getattr(one, field) for one in ordered], axis=1)


def valid_steps(ordered: Sequence[Trajectory]) -> Bools | None:
    """``[T, E]``: which steps are samples; None where all are."""
    if all(one.valid is None for one in ordered):
        return None
    every = [np.ones_like(one.terminated) if one.valid is None else one.valid for one in ordered]
    return np.concatenate(every, axis=1)
