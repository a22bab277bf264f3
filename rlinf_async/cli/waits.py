"""``waits``: who waited for whom in a run, and its bottleneck."""

from __future__ import annotations

import pathlib
import re

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlinf_async.config import UsageError
from rlinf_async.observe.bottleneck import Bottleneck, analyse
from rlinf_async.observe.files import RunFolderError

NO_TERMINAL_WIDTH = 120
"""columns where the output is not a terminal"""
RANGE = re.compile(r"(\d*)(-?)(\d*)")


@click.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=pathlib.Path))
@click.option(
    "--iteration", "chosen", metavar="A-B", help="Of these iterations, from 0 on: 5-20, 5-, or 7."
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def waits(run: pathlib.Path, chosen: str | None, as_json: bool) -> None:
    """Name the bottleneck of the run in the folder RUN, from the waits that it has recorded.

    Of the last 20 iterations, unless others are chosen; also while the run goes on.
    """
    iterations = None if chosen is None else _range(chosen)
    try:
        found = analyse(run, iterations=iterations)
    except RunFolderError as error:
        raise UsageError(str(error)) from error
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    first, last = found.iterations
    click.echo(f"{run}: iterations {first} to {last}, {found.seconds:.3g} s each")
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=NO_TERMINAL_WIDTH)
    console.print(_table(found))
    click.echo(found.text)


def _table(found: Bottleneck) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("role", "workers", "busy", "full", "waits for", "if twice as fast"):
        table.add_column(name, no_wrap=True)
    for one in found.roles:
        gain = "" if one.gain is None else f"-{max(0.0, one.gain):.0%}"
        cells = (
            *(one.role, str(one.workers), f"{one.busy:.0%}", f"{one.full:.0%}" if one.full else ""),
            *(one.waits_for, gain),
        )
        table.add_row(*map(Text, cells))
    return table


def _range(chosen: str) -> tuple[int | None, int | None]:
    """Return the first and the last iteration that are meant."""
    found = RANGE.fullmatch(chosen.strip())
    first, dash, last = found.groups() if found else ("", "", "")
    if not (first or last):
        raise UsageError(f"--iteration {chosen}: give one, as 7, or a range, as 5-20, 5- or -20")
    begin, end = int(first or 0), int(last) if dash and last else None
    if not dash:
        end = begin
    if end is not None and end < begin:
        raise UsageError(f"--iteration {chosen}: name the smaller one first")
    return begin, end
