"""Figures without pyplot: no global state, no display, and a file that is whole or not there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from rlinf_async.observe.files import replacing

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
