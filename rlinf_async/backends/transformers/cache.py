"""`RowCache`: keys and values of the rows that are decoded together, densely packed.

::

    keys[layer]   [rows, heads, positions, head size]      rows 0 .. count - 1 are in use

A row that joins comes last; if one leaves, the last takes its place. So a decoding step reads one
view of each layer, without a copy, however rows come and go. The model sees the interface of the
library's own caches, of which its attention calls `update` only.

Unused positions are zero or left from an earlier row, never NaN: masks hide them, and a hidden NaN
would still come through (0 * NaN).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GROWTH = 64
"""positions added when the cache grows, at least; else half as many as it has"""


class RowCache:
    """Keys and values of all layers."""

    is_compileable = False

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._joining: tuple[slice, Tensor] | None = None
        self._places: tuple[Tensor, Tensor] | None = None
        self._width = 0
        self._rows = 0

    def join(self, first: int, source: Tensor, width: int) -> None:
        """The next forward pass fills rows from ``first`` on: row ``i`` from its ``source[i]``.

        Args:
            first: as many rows are in use.
            source: ``[joining]``, which row of the pass each one is.
            width: positions of the pass.
        """
        self._reserve(first + len(source), width)
        self._joining, self._places = (slice(first, first + len(source)), source), None
        self._width = width

    def step(self, positions: Tensor, width: int) -> None:
        """The next forward pass adds one position to each row.

        Args:
            positions: ``[rows]``, where.
            width: over all of them, the largest plus 1.
        """
        rows = len(positions)
        self._reserve(rows, width)
        every = torch.arange(rows, device=positions.device)
        self._joining, self._places = None, (every, positions)
        self._width = width

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values ``[rows, heads, new, size]``; return what to attend to."""
        if layer_idx == len(self._keys):
            self._keys.append(self._empty(keys))
            self._values.append(self._empty(values))
        stored_keys, stored_values = self._keys[layer_idx], self._values[layer_idx]
        if self._joining is not None:
            rows, source = self._joining
            stored_keys[rows, :, : self._width] = keys[source]
            stored_values[rows, :, : self._width] = values[source]
            return keys, values
        assert self._places is not None
        every, positions = self._places
        stored_keys[every, :, positions] = keys[:, :, 0]
        stored_values[every, :, positions] = values[:, :, 0]
        count = len(every)
        return stored_keys[:count, :, : self._width], stored_values[:count, :, : self._width]

    def move(self, source: int, target: int, width: int) -> None:
        """Copy a row's first ``width`` positions over another row."""
        for stored in (*self._keys, *self._values):
            stored[target, :, :width] = stored[source, :, :width]

    def clear(self) -> None:
        """Drop all rows and release the memory."""
        self._keys, self._values, self._rows = [], [], 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the positions in use, as the library's caches do."""
        return self._width

    def _empty(self, like: Tensor) -> Tensor:
        _, heads, _, size = like.shape
        return like.new_zeros(self._rows, heads, self._positions, size)

    def _reserve(self, rows: int, width: int) -> None:
        if not self._rows:
            self._rows, self._positions = rows, width + GROWTH
            return
        if rows > self._rows or width > self._positions:
            old, held = self._rows, self._positions
            self._rows = max(2 * old, rows) if rows > old else old
            self._positions = width + max(GROWTH, held // 2) if width > held else held
            self._keys = [self._grown(stored, old, held) for stored in self._keys]
            self._values = [self._grown(stored, old, held) for stored in self._values]

    def _grown(self, stored: Tensor, rows: int, positions: int) -> Tensor:
        new = self._empty(stored)
        new[:rows, :, :positions] = stored
        return new
