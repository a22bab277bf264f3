"""``rlinf-async view``: the page of runs, on loopback."""

from __future__ import annotations

import asyncio
import pathlib
import webbrowser

import click

from rlinf_async.cli.failures import OK
from rlinf_async.view.runs import Runs
from rlinf_async.view.server import PORT, serve


@click.command()
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=click.Path(path_type=pathlib.Path))
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=PORT,
    show_default=True,
    help="Port on 127.0.0.1; 0: any that is free.",
)
@click.option("--open", "opened", is_flag=True, help="Open it in the browser.")
def view(runs: tuple[pathlib.Path, ...], port: int, opened: bool) -> int:
    """Show runs in the browser: curves, timeline, graph, samples, videos, configuration.

    RUN is the folder of a run, or one that holds runs; several are shown side by side. Without
    RUN: all below runs/. The page follows runs that go on. It is served on 127.0.0.1 only, to whom
    has the address that is printed. Ctrl-C ends it.
    """
    shown = Runs(runs)

    def announce(address: str) -> None:
        count = len(shown.all())
        click.echo(f"{count} {'run' if count == 1 else 'runs'}: {address}")
        if opened:
            webbrowser.open(address)

    try:
        asyncio.run(serve(shown, port, announce))
    except KeyboardInterrupt:
        click.echo("")  # the way in which it is meant to end
    return OK
