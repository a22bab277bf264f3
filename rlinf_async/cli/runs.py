"""Commands about another run, by its folder: ``status`` and ``stop``."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Final

import click
import msgspec
from rich.console import Console
from rich.text import Text

from rlinf_async.cli.failures import FAILED, OK
from rlinf_async.config import UsageError
from rlinf_async.observe.bottleneck import analyse
from rlinf_async.observe.files import RunFolderError
from rlinf_async.observe.progress import ProgressState, RunConsole, picture_of
from rlinf_async.observe.run_folder import MARKER, RUNS, newest_run
from rlinf_async.observe.run_lock import Driver
from rlinf_async.observe.status import RunState, look_at_run
from rlinf_async.runtime.signals import RunSignals

BEYOND_GRACE: Final = 10.0
"""seconds for which `stop` waits longer than the run's grace"""
STALE_AFTER: Final = 10.0
"""seconds after which the driver of a run is late with its status"""
NO_TERMINAL_WIDTH: Final = 120
"""columns where the output is not a terminal"""

_folder = click.argument("folder", metavar="[DIR]", required=False, type=click.Path())


@click.command()
@_folder
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def status(folder: str | None, as_json: bool) -> None:
    """Show how the run in DIR goes on, from another terminal.

    Its workers, channels and edges, who waits for whom, and its figures. Without DIR: the run under
    runs/ that was started last.
    """
    with as_usage():
        seen = look_at_run(named(folder))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(seen)))
        return
    click.echo(_sentence(seen))
    if seen.status is not None:
        _draw(seen.status.shown)
    with contextlib.suppress(RunFolderError):  # without records there is nothing to say
        click.echo(analyse(named(folder)).text)


@click.command()
@_folder
def stop(folder: str | None) -> int:
    """End the run in DIR as SIGTERM does: with a checkpoint, so that --resume goes on from it.

    Waits until it has ended. Without DIR: the run under runs/ that was started last.
    """
    with as_usage():
        path = named(folder)
        seen = look_at_run(path)
        if seen.state in ("ended", "killed"):
            raise UsageError(f"there is nothing to stop: {_sentence(seen)}")
        with Driver(path) as driver:
            if seen.state != "ending":  # a second SIGTERM would kill it
                driver.terminate()
            over = _wait(driver, seen)
    if not over:
        click.echo(
            f"error: process {driver.pid} still runs in {path}; kill -KILL {driver.pid} ends it, "
            "and what came after its newest checkpoint is lost",
            err=True,
        )
        return FAILED
    if not (path / MARKER).exists():
        click.echo(f"{path}: stopped before it had begun, nothing is left of it")
        return OK
    with as_usage():
        click.echo(_sentence(look_at_run(path)))
    return OK


def _wait(driver: Driver, seen: RunState) -> bool:
    """Wait for the end of a run, and show that; False where it takes too long."""
    grace = RunSignals().grace_seconds if seen.status is None else seen.status.grace_seconds
    what = "it is ending already" if seen.state == "ending" else "SIGTERM sent"
    limit = grace + BEYOND_GRACE
    said = f"{seen.folder}: {what}, process {driver.pid}; waiting up to {limit:g} s for its end"
    with shown_as_waiting(said):
        return driver.wait(limit)


@contextlib.contextmanager
def shown_as_waiting(what: str) -> Iterator[None]:
    """Say for what is waited while the block runs."""
    console = Console(stderr=True)
    if not console.is_terminal:
        click.echo(what, err=True)
        yield
        return
    with console.status(Text(what)):
        yield


def named(folder: str | None) -> pathlib.Path:
    """The folder of the run that is meant."""
    if folder is not None:
        return pathlib.Path(folder).expanduser()
    newest = newest_run()
    if newest is None:
        raise UsageError(f"there is no run below {RUNS.absolute()}; name the folder of one")
    return newest


def _sentence(seen: RunState) -> str:
    """The state of a run in one sentence."""
    who = f"process {seen.pid} on {seen.host}" if seen.host else "a process"
    ago = "" if seen.seconds_ago is None else f"{_duration(seen.seconds_ago)} ago"
    if seen.state == "ended":
        return f"{seen.folder}: {_ended(seen)}"
    if seen.state == "killed":
        elsewhere = "" if seen.here else " (or its lock is not seen from this host)"
        last = f"; last seen {ago}" if ago else ""
        return (
            f"{seen.folder}: killed, {who} holds it no longer{elsewhere}{last}; go on with it: "
            f"rlinf-async train FILE.toml --resume --out {seen.folder}"
        )
    late = seen.seconds_ago is not None and seen.seconds_ago > STALE_AFTER
    why = " (the process is busy or stopped, or cannot write there)" if late else ""
    return f"{seen.folder}: {seen.state}, {who}{f', seen {ago}' if ago else ''}{why}"


def _ended(seen: RunState) -> str:
    result = seen.result
    if result is None:
        return "no run goes on there, and none has come as far as to leave a summary"
    why = "".join(f": {one}" for one in (result.reached, result.error) if one)
    return (
        f"{result.outcome} after {result.iterations} iterations and "
        f"{result.train_seconds:.1f} s of training{why}"
    )


def _duration(seconds: float) -> str:
    """A time that a person reads: ``4.2 s``, ``3 min``, ``5.1 h``, ``12 days``."""
    units = ((60, 1, ".1f", "s"), (3600, 60, ".0f", "min"), (86400, 3600, ".1f", "h"))
    for below, length, form, unit in units:
        if seconds < below:
            return f"{seconds / length:{form}} {unit}"
    return f"{seconds / 86400:.0f} days"


def _draw(shown: ProgressState) -> None:
    console = RunConsole(highlight=False)
    if not console.is_terminal:
        console = RunConsole(highlight=False, width=NO_TERMINAL_WIDTH)
    console.print(picture_of(shown, console.width, whole=True))


@contextlib.contextmanager
def as_usage() -> Iterator[None]:
    """Report a folder that is not a run's, or cannot be read, as wrong input."""
    try:
        yield
    except RunFolderError as error:
        raise UsageError(str(error)) from error
