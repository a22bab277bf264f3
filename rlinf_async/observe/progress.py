"""The live view of a run: a table redrawn in a terminal, a plain line now and then elsewhere.

The view has no thread and no timer of its own: it draws in `ProgressView.update`, as often as its
rate allows. Nothing that happens to the terminal stops a run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_REDRAW_SECONDS: Final = 0.2
_ROWS: Final = 10  # of each table in the live view; the rest is counted
_NARROW: Final = 72  # columns, below which bars and details are left out


class ChannelView(msgspec.Struct, kw_only=True, frozen=True):
    """One channel: how many items it holds, of how many it takes."""

    name: str
    depth: int
    capacity: int | None = None
    items_per_second: float | None = None


class EdgeView(msgspec.Struct, kw_only=True, frozen=True):
    """The items from a worker into a channel, or from a channel to a worker."""

    name: str
    items_per_second: float
    bytes_per_second: float
    shared: int = 0
    """number of items whose large arrays came without a copy"""
    copied: int = 0
    """number of items whose large arrays came through the socket"""
    credit_waits: int = 0


class WorkerView(msgspec.Struct, kw_only=True, frozen=True):
    """One worker: what it does, or what it waits for, and since how many seconds."""

    name: str
    doing: str = ""
    waiting_for: str | None = None
    waiting_seconds: float = 0.0
    restarts: int = 0
    replaced: int = 0
    """number of times that it was swapped for another"""
    failure: str = ""
    """the last end of its process that failed an episode: environment, seed and step"""
    host: str | None = None
    """host of the worker's process, where it has one of its own"""
    devices: Sequence[str] = ()
    """accelerators of the worker, or cores: ``cuda:0``"""
    live: bool = True
    """whether its process runs; one that has died is started again, or ends the run"""


class WaitView(msgspec.Struct, kw_only=True, frozen=True):
    """A wait on a channel, of a worker's method or of the run itself."""

    party: str
    operation: str
    """``put`` or ``get``"""
    channel: str
    key: str | None = None
    seconds: float
    unblockers: Sequence[str] = ()
    """parties who can end the wait: they hold the other end of the channel"""


class ProgressState(msgspec.Struct, kw_only=True):
    """The contents of the view."""

    run: str
    iteration: int
    iterations: int | None = None
    figures: Sequence[tuple[str, str]] = ()
    """The numbers of the run as shown: name and value."""
    channels: Sequence[ChannelView] = ()
    edges: Sequence[EdgeView] = ()
    workers: Sequence[WorkerView] = ()
    waits: Sequence[WaitView] = ()
    note: str = ""
    """What the run is doing now: starting, evaluating, restarting a worker."""


class RunConsole(Console):
    """A console that survives the end of its reader (``| head``): rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Print nothing more, and redirect the output, so that other prints do not fail."""
        self.quiet = True
        with contextlib.suppress(OSError):  # no descriptor: nothing to redirect
            broken = self.file.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, broken)
            os.close(nowhere)


class ProgressView:
    """Shows the newest `ProgressState`.

    ::

        with ProgressView() as view:
            view.update(state)

    Args:
        console: where to; standard output where it is None.
        interval: seconds between two lines where the output is not a terminal.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        *,
        console: RunConsole | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = RunConsole(highlight=False) if console is None else console
        self._clock = clock
        self._every = _REDRAW_SECONDS if self._console.is_terminal else interval
        self._live: Live | None = None
        self._newest: ProgressState | None = None
        self._shown: ProgressState | None = None
        self._next = float("-inf")
        self._line = ""

    def update(self, state: ProgressState) -> None:
        """Take the newest state, and show it if the last one was shown long enough ago."""
        self._newest = state
        now = self._clock()
        if now >= self._next:
            self._next = now + self._every
            self._show(state)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._guarded(self._live.start)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Show the last state, if it came too soon after the one before to be shown."""
        if self._newest is not None and self._newest is not self._shown:
            self._show(self._newest)
        if self._live is not None:
            self._guarded(self._live.stop)
            self._live = None

    def _show(self, state: ProgressState) -> None:
        self._shown = state
        live = self._live
        if live is not None:
            picture = picture_of(state, self._console.width)
            self._guarded(lambda: live.update(picture, refresh=True))
            return
        line = line_of(state)
        if line.plain != self._line:
            self._line = line.plain
            self._guarded(lambda: self._console.print(line, soft_wrap=True))

    def _guarded(self, show: Callable[[], object]) -> None:
        """Show; without a terminal (a closed ssh session), go on without a view."""
        try:
            show()
        except OSError:
            self._console.quiet = True


def line_of(state: ProgressState) -> Text:
    """The state in one plain ASCII line."""
    parts = [f"{state.run}: iteration {_out_of(state.iteration, state.iterations)}"]
    parts += [f"{name} {value}" for name, value in state.figures]
    if state.channels:
        depths = (f"{view.name} {_out_of(view.depth, view.capacity)}" for view in state.channels)
        parts.append("channels " + ", ".join(depths))
    waiting = [view.name for view in state.workers if view.waiting_for is not None]
    if waiting:
        parts.append("waiting: " + ", ".join(waiting))
    return Text(" | ".join([*parts, *([state.note] if state.note else [])]))


def picture_of(state: ProgressState, width: int, *, whole: bool = False) -> RenderableType:
    """Return the state as the table of the live view, for a terminal of ``width`` columns.

    ``whole``: with every row, and with hosts, devices and waits, whatever its height.
    """
    rows = None if whole else _ROWS
    wide = width >= _NARROW
    parts: list[RenderableType] = [_headline(state, wide=wide)]
    if wide and state.iterations:
        bar = Table.grid(expand=True)
        bar.add_row(ProgressBar(total=state.iterations, completed=state.iteration))
        parts.append(bar)
    if state.note:
        parts.append(Text(state.note, style="yellow", overflow="ellipsis", no_wrap=True))
    if state.channels:
        parts.append(_channels(state.channels, rows, wide=wide))
    if state.edges and wide:
        parts.append(_edges(state.edges, rows))
    if state.workers:
        parts.append(_workers(state.workers, rows, wide=wide))
        failures = ((view.name, view.failure) for view in state.workers if view.failure and whole)
        parts += [Text(f"{name} failed: {failure}", style="yellow") for name, failure in failures]
    if state.waits and whole:
        parts.append(_waits(state.waits))
    body = Group(*parts)
    return Panel(body, title=Text(state.run), title_align="left") if wide else body


def _headline(state: ProgressState, *, wide: bool) -> RenderableType:
    """The numbers of the run: a row of a table, or where that is too wide a text that folds."""
    figures = [
        ("iteration", _out_of(state.iteration, state.iterations)),
        *state.figures,
    ]
    if not wide:
        named = (Text.assemble(f"{name} ", (value, "bold")) for name, value in figures)
        return Text(", ").join(named)
    table = _table(*(name for name, _ in figures))
    table.add_row(*(Text(value, style="bold") for _, value in figures))
    return table


def _channels(channels: Sequence[ChannelView], rows: int | None, *, wide: bool) -> Table:
    table = _table("channel", "depth", *(["fill", "items/s"] if wide else []))
    for view in channels[:rows]:
        cells: list[RenderableType] = [Text(view.name), Text(_out_of(view.depth, view.capacity))]
        if wide:
            cells += [_fill(view), Text(figure(view.items_per_second, ",.0f"))]
        table.add_row(*cells)
    return _with_rest(table, len(channels), rows)


def _fill(view: ChannelView) -> RenderableType:
    """A bar that is red where the channel is full: its senders wait."""
    if not view.capacity:
        return Text("no limit", style="dim")
    style = "red" if view.depth >= view.capacity else "cyan"
    return ProgressBar(
        total=view.capacity,
        completed=min(view.depth, view.capacity),
        width=16,
        complete_style=style,
        finished_style=style,
    )


def _edges(edges: Sequence[EdgeView], rows: int | None) -> Table:
    """The traffic of the edges; where not all can be shown, those with the most bytes."""
    shown = sorted(edges, key=lambda view: -view.bytes_per_second)[:rows]
    table = _table("edge", "items/s", "MB/s", "no copy", "copied", "credit waits")
    for view in shown:
        rates = f"{view.items_per_second:,.0f}", f"{view.bytes_per_second / 1e6:,.2f}"
        counts = (str(count or "") for count in (view.shared, view.copied, view.credit_waits))
        table.add_row(Text(view.name), *map(Text, (*rates, *counts)))
    return _with_rest(table, len(edges), rows)


def _workers(workers: Sequence[WorkerView], rows: int | None, *, wide: bool) -> Table:
    """The workers; where not all can be shown, those that wait longest."""
    shown, placed = workers, rows is None
    if rows is not None and len(workers) > rows:
        shown = sorted(workers, key=lambda view: -view.waiting_seconds)[:rows]
    where = ["host", "devices"] if placed else []
    table = _table("worker", *where, "doing", *(["restarts"] if wide else []))
    for view in shown:
        place = [view.host or "", " ".join(view.devices) or "cpu"] if placed else []
        cells = [Text(view.name), *map(Text, place), _doing(view)]
        if wide:
            cells.append(Text(_lives(view), style="yellow"))
        table.add_row(*cells)
    return _with_rest(table, len(workers), rows)


def _lives(view: WorkerView) -> str:
    """How often it was started again, and how often swapped."""
    restarts = str(view.restarts) if view.restarts else ""
    swaps = f"{view.replaced} swapped" if view.replaced else ""
    return ", ".join(filter(None, (restarts, swaps)))


def _doing(view: WorkerView) -> Text:
    if not view.live:
        return Text("no process", style="yellow")
    if view.waiting_for is None:
        return Text(view.doing, style="green")
    return Text(f"waits {view.waiting_seconds:.1f} s for {view.waiting_for}", style="dim")


def _waits(waits: Sequence[WaitView]) -> Table:
    """Who waits for whom, the longest first; tasks of a worker that wait for the same as one."""
    alike: dict[tuple[str, str, tuple[str, ...]], list[float]] = {}
    for view in waits:
        key = "" if view.key is None else f" (key {view.key})"
        what = f"{view.operation} {view.channel}{key}"
        alike.setdefault((view.party, what, tuple(view.unblockers)), []).append(view.seconds)
    table = _table("who waits", "s", "to", "for")
    for (party, what, unblockers), seconds in sorted(alike.items(), key=lambda one: -max(one[1])):
        tasks = f" ({len(seconds)} tasks)" if len(seconds) > 1 else ""
        cells = party + tasks, f"{max(seconds):.1f}", what, ", ".join(unblockers) or "nobody"
        table.add_row(*map(Text, cells))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    return table


def _with_rest(table: Table, count: int, rows: int | None) -> Table:
    if rows is not None and count > rows:
        table.add_row(Text(f"and {count - rows} more", style="dim"))
    return table


def _out_of(value: int, total: int | None) -> str:
    return str(value) if total is None else f"{value}/{total}"


def figure(value: float | None, form: str) -> str:
    """A number as it is shown; a dash where there is none yet."""
    return "-" if value is None else format(value, form)
