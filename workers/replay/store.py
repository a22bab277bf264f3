"""The store: a ring of transitions, one array for each column, in memory or in mapped files.

::

    number of a transition   0 . . . . . first ........... count
                             overwritten |  in the window   |  not there yet

A transition's number is its place in the order in which all came; its slot is that modulo the
number of slots. The newest ``capacity`` are in the window.

Files are written through a shared mapping: what was written is there after a SIGKILL of the
process, because the pages belong to the system. ``spare`` slots beyond the capacity keep what a
checkpoint's window holds from being overwritten until the next checkpoint, so that a checkpoint is
two numbers and no copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.embodied import Ints
from rlinf_async.messages.spaces import ActionSpec, ObservationSpec
from rlinf_async.observe.files import atomic_write
from rlinf_async.workers.replay.errors import ReplayError

LAYOUT = "layout.json"


class Column(NamedTuple):
    """One array of the store: ``[slots, *shape]``."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one transition."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


def columns_of(observation: ObservationSpec, action: ActionSpec) -> dict[str, Column]:
    """Return the columns of transitions between these spaces."""
    row = observation.empty(1)
    seen = Column(row.dtype, row.shape[1:])
    number, whole = np.dtype(np.float32), np.dtype(np.int64)
    return {
        "observation": seen,
        "action": Column(whole if action.discrete else number, action.shape),
        "reward": Column(number, ()),
        "next_observation": seen,
        "discount": Column(number, ()),
        "version": Column(whole, ()),
        "priority": Column(number, ()),
    }


def bytes_of(columns: Mapping[str, Column], slots: int) -> int:
    """Return the size of a store."""
    return slots * sum(column.row_bytes for column in columns.values())


class _Layout(msgspec.Struct, frozen=True):
    """Of the files of a store: they are of the run that made them."""

    slots: int
    columns: dict[str, str]


class ReplayStore:
    """Transitions by number.

    Args:
        columns: by name.
        capacity: transitions in the window.
        spare: further slots, of what has left the window.
        folder: of the files; None: in memory.
        fresh: make new files; else those that are there are opened.

    Raises `ReplayError` where files that are to be opened are missing, or of another layout.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        capacity: int,
        *,
        spare: int = 0,
        folder: Path | None = None,
        fresh: bool = True,
    ) -> None:
        self.capacity, self.slots = capacity, capacity + spare
        self.count = 0
        """transitions that ever came"""
        self.oldest = 0
        """number before which transitions are not there, though the window might begin earlier"""
        if folder is None:
            self.arrays: dict[str, NDArray[Any]] = {
                name: np.zeros((self.slots, *column.shape), column.dtype)
                for name, column in columns.items()
            }
        else:
            self.arrays = _mapped(columns, self.slots, folder, fresh=fresh)

    @property
    def first(self) -> int:
        """The number of the oldest transition in the window."""
        return max(self.oldest, self.count - self.capacity)

    def __len__(self) -> int:
        return self.count - self.first

    def slots_of(self, numbers: Ints) -> Ints:
        """Return where these transitions lie."""
        return numbers % self.slots

    def write(self, rows: Mapping[str, NDArray[Any]]) -> Ints:
        """Write new transitions ``[N, ...]`` behind the newest, and return their numbers.

        They are in the window once `count` is moved on by ``N``.
        """
        numbers = np.arange(self.count, self.count + len(rows["reward"]))
        slots = self.slots_of(numbers)
        for name, array in rows.items():
            self.arrays[name][slots] = array
        return numbers

    def take(self, numbers: Ints) -> dict[str, NDArray[Any]]:
        """Return copies of these transitions, by column."""
        slots = self.slots_of(numbers)
        return {name: array[slots] for name, array in self.arrays.items()}

    @property
    def numbers(self) -> Ints:
        """The numbers of all transitions in the window."""
        return np.arange(self.first, self.count)


def _mapped(
    columns: Mapping[str, Column], slots: int, folder: Path, *, fresh: bool
) -> dict[str, NDArray[Any]]:
    described = {name: f"{column.dtype} {list(column.shape)}" for name, column in columns.items()}
    layout = _Layout(slots, described)
    path = folder / LAYOUT
    if fresh:
        folder.mkdir(parents=True, exist_ok=True)
    else:
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_Layout)
        except (OSError, msgspec.DecodeError) as error:
            raise ReplayError(
                f"the replay store in {folder} cannot be opened: {error}. Restore it, or start "
                "again in another folder"
            ) from error
        if found != layout:
            raise ReplayError(
                f"the replay store in {folder} has {found.slots} slots of {found.columns}; this "
                f"run has {slots} of {described}: it cannot go on with it"
            )
    arrays: dict[str, NDArray[Any]] = {}
    for name, column in columns.items():
        file = folder / f"{name}.bin"
        if not fresh and not file.is_file():
            raise ReplayError(f"{file} is missing: restore it, or start again in another folder")
        arrays[name] = np.memmap(
            file, column.dtype, "w+" if fresh else "r+", shape=(slots, *column.shape)
        )
    if fresh:
        atomic_write(path, msgspec.json.encode(layout))
    return arrays
