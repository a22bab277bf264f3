"""Pictures of a run: who was busy when, and what was learned.

The timeline has one row per worker, one colour per span name. Its upper part shows the whole run,
the lower part a short stretch of its middle, in which single spans can be seen. A column of pixels
is coloured by the share of its time that each name had, so that a hundred thousand spans are drawn
as truly as ten.

The learning curve shows what a run is measured by, over what it took and over seconds.

Figures are made without pyplot: no global state, no display, and a file that is whole or not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.observe.files import replacing
from rlinf_async.observe.metrics import (
    ACCURACY,
    ENV_STEPS,
    EXAMPLES,
    RESPONSE_TOKENS,
    RETURN,
    REWARD,
    SAMPLES,
    SECONDS,
    STEP,
    SUCCESS_RATE,
    read_columns,
)
from rlinf_async.observe.trace import Busy, ForegroundPeriod, Span, busy, by_worker, foreground

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK: Final = "#1f2933"
FAINT: Final = "#7b8794"
GRID: Final = "#e4e7eb"
# Okabe and Ito's colours, which people with any colour vision tell apart, and tints for the rest.
COLOURS: Final = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#b8a900",
    "#7e57c2",
    "#8d6e63",
    "#546e7a",
)


def new_figure(width: float, height: float) -> Figure:
    """An empty white figure, in inches. matplotlib is imported here, and not by workers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def quiet(axes: Axes) -> None:
    """Keep of the frame what carries information."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=FAINT, labelcolor=INK, labelsize=9)


def headline(figure: Figure, text: str) -> None:
    """The title of a figure, flush left."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)


def save(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG.

    Raises:
        RunFolderError: the file could not be written.
    """
    with replacing(path) as partial:
        figure.savefig(partial, format="png")


_COLUMNS: Final = 1600
_IDLE: Final = "#eceff3"
_ROW_SHARE: Final = 0.72  # of the height of a row; the rest is the gap to the next
_FEWEST: Final = 60  # pieces that the busiest worker shows in a close-up of our own choice,
_MOST: Final = 240  # and the most: more than so many cannot be told apart
_OF_THE_CALMEST: Final = 4  # pieces that the calmest worker shows, where the two above allow it


class _Run(msgspec.Struct, frozen=True):
    """The pieces of every worker and the window that they share."""

    start: int
    end: int
    pieces: dict[str, list[ForegroundPeriod]]
    summary: list[Busy]


def draw_timeline(
    spans: Iterable[Span],
    path: Path,
    *,
    title: str = "Who was busy when",
    left_out: Mapping[str, int] | None = None,
    close_up: float | None = None,
) -> list[Busy]:
    """Draw the picture, and return where each worker's time went.

    Args:
        left_out: number of missing spans by worker; said in the picture.
        close_up: seconds of the lower part; chosen by the density of the spans where it is None,
            and left out where the whole run is short enough to be seen at once.

    Raises:
        RunFolderError: the file could not be written.
    """
    run = _measure(spans)
    colours = _colours(run.summary)
    middle = _close_up(run, close_up)
    panels = [(run.start, run.end, "the whole run"), *middle]
    figure = new_figure(11.0, 1.5 + len(panels) * (0.6 + 0.3 * max(2, len(run.pieces))))
    headline(figure, title)
    for place, (start, end, name) in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, place + 1)
        _draw_panel(axes, run, colours, (start, end), name)
    _legend(figure, run, colours, sum((left_out or {}).values()))
    save(figure, path)
    return run.summary


def _measure(spans: Iterable[Span]) -> _Run:
    rows = by_worker(spans)
    start = min((span.start for row in rows.values() for span in row), default=0)
    # At least a microsecond, so that the picture of an empty run has an axis.
    end = max((span.end for row in rows.values() for span in row), default=10**9)
    end = max(end, start + 1000)
    pieces = {worker: foreground(row) for worker, row in rows.items()}
    summary = [busy(worker, row, end - start) for worker, row in pieces.items()]
    return _Run(start, end, pieces, summary)


def _colours(summary: Sequence[Busy]) -> dict[str, str]:
    """The names by their share of all time, largest first, each with its colour."""
    total: dict[str, float] = {}
    for row in summary:
        for name, seconds in row.seconds_by_name.items():
            total[name] = total.get(name, 0.0) + seconds
    names = sorted(total, key=lambda name: -total[name])
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}


def _close_up(run: _Run, close_up: float | None) -> list[tuple[int, int, str]]:
    """The stretch of the close-up, or nothing where the run is its own close-up."""
    length = _close_up_length(run) if close_up is None else int(close_up * 1e9)
    if not 0 < length < (run.end - run.start) // 2:
        return []
    calmest = min(run.pieces.values(), key=len)
    middle = min((abs(p.start - (run.start + run.end) // 2), p.start) for p in calmest)[1]
    start = min(max(middle - length // 2, run.start), run.end - length)
    return [(start, start + length, f"{_duration(length)} of its middle")]


def _close_up_length(run: _Run) -> int:
    """Nanoseconds in which both the busiest and the calmest worker show something to see."""
    counts = [len(row) for row in run.pieces.values()]
    whole = run.end - run.start
    if not counts or not all(counts):
        return 0
    wanted = whole * _OF_THE_CALMEST / min(counts)
    return int(min(max(wanted, whole * _FEWEST / max(counts)), whole * _MOST / max(counts)))


def _draw_panel(
    axes: Axes, run: _Run, colours: Mapping[str, str], window: tuple[int, int], name: str
) -> None:
    start, end = ((moment - run.start) / 1e9 for moment in window)
    for place, pieces in enumerate(run.pieces.values()):
        image = _pixel_row(pieces, window, colours)
        half = _ROW_SHARE / 2
        axes.imshow(
            image[None],
            extent=(start, end, place + half, place - half),
            aspect="auto",
            interpolation="nearest",
        )
    axes.set_xlim(start, end)
    axes.set_ylim(len(run.pieces) - 0.4, -0.6)
    _label_rows(axes, run, window)
    axes.set_title(name, loc="left", fontsize=10, color=FAINT)
    axes.set_xlabel("seconds since the first span", fontsize=9, color=INK)
    quiet(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _label_rows(axes: Axes, run: _Run, window: tuple[int, int]) -> None:
    """Each worker's name on the left, and its idle share in this window on the right."""
    start, end = window
    labels = []
    for worker, pieces in run.pieces.items():
        seen = [_cut(piece, start, end) for piece in pieces if _overlaps(piece, start, end)]
        share = busy(worker, seen, end - start).idle_share
        labels.append(worker)
        axes.text(
            1.01,
            len(labels) - 1,
            f"{share:.0%} idle",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=9,
            color=INK,
        )
    axes.set_yticks(range(len(labels)), labels)


def _overlaps(piece: ForegroundPeriod, start: int, end: int) -> bool:
    return piece.end > start and piece.start < end


def _cut(piece: ForegroundPeriod, start: int, end: int) -> ForegroundPeriod:
    return piece._replace(start=max(piece.start, start), end=min(piece.end, end))


def _pixel_row(
    pieces: Sequence[ForegroundPeriod], window: tuple[int, int], colours: Mapping[str, str]
) -> NDArray[np.float64]:
    """One row of pixels ``[columns, rgb]``: the colours of the names mixed by their time."""
    from matplotlib.colors import to_rgb

    start, end = window
    idle = np.array(to_rgb(_IDLE))
    image = np.tile(idle, (_COLUMNS, 1))
    shown = [piece for piece in pieces if not piece.waiting and _overlaps(piece, start, end)]
    for name in {piece.name for piece in shown}:
        edges = np.array([(p.start, p.end) for p in shown if p.name == name], dtype=np.float64)
        share = _coverage((edges - start) * (_COLUMNS / (end - start)))
        image += share[:, None] * (np.array(to_rgb(colours[name])) - idle)
    return np.asarray(np.clip(image, 0.0, 1.0), dtype=np.float64)


def _coverage(edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of each column ``[columns]`` that the intervals ``[n, 2]`` cover; columns
    are 1 wide.

    The covered length left of a point is the sum of the intervals' ramps: its differences at the
    columns' borders are the shares, whatever the number of intervals.
    """
    bounded = np.sort(np.clip(edges, 0.0, float(_COLUMNS)), axis=0)
    lengths = np.concatenate([[0.0], np.cumsum(bounded[:, 1] - bounded[:, 0])])
    borders = np.arange(_COLUMNS + 1, dtype=np.float64)
    begun = np.searchsorted(bounded[:, 0], borders, side="right")
    last = np.maximum(begun - 1, 0)
    inside = np.minimum(borders, bounded[last, 1]) - bounded[last, 0]
    covered = np.where(begun > 0, lengths[last] + inside, 0.0)
    return np.asarray(np.diff(covered))


def _legend(figure: Figure, run: _Run, colours: Mapping[str, str], left_out: int) -> None:
    from matplotlib.patches import Patch

    workers = max(len(run.summary), 1)
    whole = max((run.end - run.start) / 1e9 * workers, 1e-12)
    handles = []
    for name, colour in colours.items():
        share = sum(row.seconds_by_name.get(name, 0.0) for row in run.summary) / whole
        label = f"{share:.0%}" if share >= 0.005 else "<1%"
        handles.append(Patch(color=colour, label=f"{name}  {label}"))
    idle = sum(row.idle_share for row in run.summary) / workers
    handles.append(Patch(color=_IDLE, label=f"idle  {idle:.0%}" if run.summary else "no spans"))
    legend = figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(6, len(handles)),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        title=f"{left_out:,} spans were left out" if left_out else None,
        title_fontproperties={"size": 9},
    )
    legend.get_title().set_color(FAINT)


def _duration(nanoseconds: int) -> str:
    seconds = nanoseconds / 1e9
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


Series = NDArray[np.float64]


class Measure(NamedTuple):
    """One row of the picture, and its ``eval_`` twin where the run evaluates."""

    column: str
    label: str
    colour: str
    is_share: bool


class Curves(NamedTuple):
    """Measures of one kind of run, and what they are drawn over."""

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
SUPERVISED: Final = Curves(
    measures=(
        Measure("loss", "loss", COLOURS[0], False),
        Measure("reward_accuracy", "accuracy of the reward", COLOURS[2], True),
        Measure("reward_margin", "margin of the reward", COLOURS[1], False),
    ),
    axes=((EXAMPLES, "examples"), (SECONDS, "training seconds")),
    nothing="no step has finished",
)

WORLD_MODEL: Final = Curves(
    measures=(
        Measure("loss", "loss", COLOURS[0], False),
        Measure("reward_loss", "loss of the reward", COLOURS[1], False),
    ),
    axes=(("updates", "updates"), (SECONDS, "training seconds")),
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
    _format_axes(axes, row, target)


def _format_axes(axes: Axes, row: Measure, target: float | None) -> None:
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
