"""A picture of the learning: what a run is measured by, over what it took and over seconds."""

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
from rlinf_async.observe.metrics import (
    ACCURACY,
    ENV_STEPS,
    RESPONSE_TOKENS,
    RETURN,
    REWARD,
    SAMPLES,
    SECONDS,
    SUCCESS_RATE,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = NDArray[np.float64]


class Measure(NamedTuple):
    """One row of the picture, and its ``eval_`` twin where the run evaluates."""

    column: str
    label: str
    colour: str
    is_share: bool


class Curves(NamedTuple):
    """What one kind of run is measured by, and over what."""

    measures: tuple[Measure, ...]
    axes: tuple[tuple[str, str], ...]
    """columns and their labels"""
    nothing: str
    """what the picture says where there is nothing to draw"""


EMBODIED: Final = Curves(
    measures=(
        Measure(SUCCESS_RATE, "success rate", COLOURS[2], True),
        Measure(RETURN, "episode return", COLOURS[0], False),
    ),
    axes=((ENV_STEPS, "environment steps"), (SECONDS, "training seconds")),
    nothing="no episode has finished",
)
LANGUAGE: Final = Curves(
    measures=(
        Measure(ACCURACY, "accuracy", COLOURS[2], True),
        Measure(REWARD, "reward", COLOURS[0], False),
        Measure(RESPONSE_TOKENS, "tokens of a response", COLOURS[1], False),
    ),
    axes=((SAMPLES, "samples"), (SECONDS, "training seconds")),
    nothing="no iteration has finished",
)


def draw_learning_curve(
    metrics_csv: Path,
    path: Path,
    *,
    title: str = "Learning curve",
    target: float | None = None,
    curves: Curves = EMBODIED,
) -> None:
    """Draw the picture from ``metrics.csv``: thin as measured, thick smoothed.

    What the file does not have is left out: an env without a notion of success has one row.
    Evaluations (``eval_return``, ``eval_success_rate``) stand as dots. ``target`` is a share to
    draw a line at.

    Raises:
        RunFolderError: the CSV cannot be read, or the picture not written.
    """
    columns = {name: np.asarray(cells) for name, cells in read_columns(metrics_csv).items()}
    rows = [row for row in curves.measures if _shown(columns, row)]
    across = [axis for axis in curves.axes if _has_numbers(columns, axis[0])] or [
        (STEP, "iterations")
    ]
    figure = new_figure(5.2 * len(across), 1.0 + 2.6 * max(1, len(rows)))
    headline(figure, title if rows else f"{title}: {curves.nothing}")
    grid = figure.subplots(max(1, len(rows)), len(across), squeeze=False, sharex="col")
    for place, row in enumerate(rows):
        for axes, (column, _) in zip(grid[place], across, strict=True):
            _draw(axes, columns, column, row, target)
        grid[place][0].set_ylabel(row.label, fontsize=10, color=INK)
    for axes, (_, label) in zip(grid[-1], across, strict=True):
        axes.set_xlabel(label, fontsize=10, color=INK)
    save(figure, path)


def _shown(columns: Mapping[str, Series], row: Measure) -> bool:
    return _has_numbers(columns, row.column) or _has_numbers(columns, f"eval_{row.column}")


def _has_numbers(columns: Mapping[str, Series], name: str) -> bool:
    return name in columns and bool(np.isfinite(columns[name]).any())


def _draw(
    axes: Axes, columns: Mapping[str, Series], across: str, row: Measure, target: float | None
) -> None:
    if _has_numbers(columns, row.column):
        x, y = _measured(columns, across, row.column)
        axes.plot(x, y, color=row.colour, linewidth=0.9, alpha=0.35)
        axes.plot(x, _smooth(y), color=row.colour, linewidth=2.0, label="while training")
    evaluation = f"eval_{row.column}"
    if _has_numbers(columns, evaluation):
        x, y = _measured(columns, across, evaluation)
        axes.plot(x, y, "o", color=COLOURS[5], markersize=5, label="evaluation")
    _dress(axes, row, target)


def _dress(axes: Axes, row: Measure, target: float | None) -> None:
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
