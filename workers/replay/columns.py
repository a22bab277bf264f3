"""Columns: what a store keeps of a transition.

Where images are compressed, a column of observations has, in their place, where their bytes lie
(`rlinf_async.workers.replay.images`)::

    shown   state float32 [3]    image uint8 [84, 84, 3]
    kept    state float32 [3]    image offset int64, length int32
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from rlinf_async.messages.spaces import ActionSpec, ObservationSpec


class ReplayError(Exception):
    """The files of a store are missing, damaged, or of another run."""


PLACE: Final[np.dtype[Any]] = np.dtype([("offset", np.int64), ("length", np.int32)])
"""where a compressed image lies, in the file of its segment"""


class Column(NamedTuple):
    """One array of the store: ``[slots, *shape]``."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    images: tuple[str, ...] = ()
    """fields that are compressed"""

    @property
    def kept(self) -> np.dtype[Any]:
        """The dtype of the array: that of what is shown, but for what is compressed."""
        if not self.images:
            return self.dtype
        names = self.dtype.names or ()
        return np.dtype(
            [(name, PLACE if name in self.images else self.dtype[name]) for name in names]
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one transition in the array."""
        return self.kept.itemsize * int(np.prod(self.shape, dtype=np.int64))


def columns_of(
    observation: ObservationSpec,
    action: ActionSpec,
    *,
    episodes: bool = False,
    compressed: bool = False,
) -> dict[str, Column]:
    """Return the columns of transitions between these spaces; with ``episodes``, also to which
    episode each belongs: the number of its first transition."""
    row = observation.empty(1)
    images = tuple(part.name for part in observation.of_kind("image")) if compressed else ()
    seen = Column(row.dtype, row.shape[1:], images)
    number, whole = np.dtype(np.float32), np.dtype(np.int64)
    return {
        "observation": seen,
        "action": Column(whole if action.discrete else number, action.shape),
        "reward": Column(number, ()),
        "next_observation": seen,
        "discount": Column(number, ()),
        "version": Column(whole, ()),
        "priority": Column(number, ()),
        **({"episode": Column(whole, ())} if episodes else {}),
    }


def bytes_of(columns: Mapping[str, Column], slots: int) -> int:
    """Return the size of a store, without what is compressed."""
    return slots * sum(column.row_bytes for column in columns.values())
