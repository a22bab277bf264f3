"""A picture of the learning: return and success, over environment steps and over seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlinf_async.observe.csv_log import STEP, read_columns
from rlinf_async.observe.figures import (
    COLOURS,
    FAINT,
    GRID,
    INK,
    headline,
    new_figure,
    quiet,
    save,
)
from rlinf_async.observe.metrics import ENV_STEPS, RETURN, SECONDS, SUCCESS_RATE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = NDArray[np.float64]


class _Row(NamedTuple):
    """One measure of the picture, and its ``eval_`` twin where the run evaluates."""

    column: str
    label: str
    colour: str
    is_share: bool


_ROWS: Final = (
    _Row(SUCCESS_RATE, "success rate", COLOURS[2], True),
    _Row(RETURN, "episode return", COLOURS[0], False),
)
_AXES: Final = ((ENV_STEPS, "environment steps"), (SECONDS, "training seconds"))


def draw_learning_curve(
    metrics_csv: Path, path: Path, *, title: str = "Learning curve", target: float | None = None
) -> None:
    """Draw the picture from ``metrics.csv``: thin as measured, thick smoothed.

    What the file does not have is left out: an env without a notion of success has one row.
    Evaluations (``eval_return``, ``eval_success_rate``) stand as dots. ``target`` is a success
    rate to draw a line at.

    Raises:
        RunFolderError: the CSV cannot be read, or the picture not written.
    """
    columns = {name: np.asarray(cells) for name, cells in read_columns(metrics_csv).items()}
    rows = [row for row in _ROWS if _has_numbers(columns, row.column)]
    across = [axis for axis in _AXES if _has_numbers(columns, axis[0])] or [(STEP, "iterations")]
    figure = new_figure(5.2 * len(across), 1.0 + 2.6 * max(1, len(rows)))
    headline(figure, title if rows else f"{title}: no episode has finished")
    grid = figure.subplots(max(1, len(rows)), len(across), squeeze=False, sharex="col")
    for place, row in enumerate(rows):
        for axes, (column, _) in zip(grid[place], across, strict=True):
            _draw(axes, columns, column, row, target)
        grid[place][0].set_ylabel(row.label, fontsize=10, color=INK)
    for axes, (_, label) in zip(grid[-1], across, strict=True):
        axes.set_xlabel(label, fontsize=10, color=INK)
    save(figure, path)


def _has_numbers(columns: Mapping[str, Series], name: str) -> bool:
    return name in columns and bool(np.isfinite(columns[name]).any())


def _draw(
    axes: Axes, columns: Mapping[str, Series], across: str, row: _Row, target: float | None
) -> None:
    x, y = _measured(columns, across, row.column)
    axes.plot(x, y, color=row.colour, linewidth=0.9, alpha=0.35)
    axes.plot(x, _smooth(y), color=row.colour, linewidth=2.0, label="while training")
    evaluation = f"eval_{row.column}"
    if _has_numbers(columns, evaluation):
        x, y = _measured(columns, across, evaluation)
        axes.plot(x, y, "o", color=COLOURS[5], markersize=5, label="evaluation")
    _dress(axes, row, target)


def _dress(axes: Axes, row: _Row, target: float | None) -> None:
    from matplotlib.ticker import EngFormatter, PercentFormatter

    if row.is_share:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
        if target is not None:
            label = f"target {target:.0%}"
            axes.axhline(target, color=FAINT, linewidth=1.0, linestyle=(0, (4, 3)), label=label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", frameon=False, fontsize=8, labelcolor=INK)
    quiet(axes)


def _measured(columns: Mapping[str, Series], x: str, y: str) -> tuple[Series, Series]:
    """The rows that have both numbers."""
    both = np.isfinite(columns[x]) & np.isfinite(columns[y])
    return columns[x][both], columns[y][both]


def _smooth(values: Series) -> Series:
    """A centred running mean over a twentieth of the rows; windows shrink towards the ends."""
    half = len(values) // 40
    total = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(values))
    reach = np.minimum(np.minimum(place, len(values) - 1 - place), half)
    return np.asarray((total[place + reach + 1] - total[place - reach]) / (2 * reach + 1))
