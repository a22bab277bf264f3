"""``rlinf-async replay`` and ``rlinf-async bundle``."""

from __future__ import annotations

import math
import pathlib
import statistics
from collections.abc import Sequence

import click
import msgspec

from rlinf_async.cli.failures import FAILED, OK
from rlinf_async.config import UsageError
from rlinf_async.replaying.bundle import DEFAULT_ITERATIONS, bundle_run
from rlinf_async.replaying.report import ReplayReport, Scores
from rlinf_async.replaying.run import DEFAULT_TOLERANCE, replay_opened
from rlinf_async.replaying.source import opened
from rlinf_async.runtime.signals import run

BINS = 10
"""bars of a distribution"""
BAR = 40
"""characters of the longest bar"""


@click.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=pathlib.Path))
@click.option("--only", metavar="ROLE[:RANK]", help="The worker: actor, rollout:1, Reward[0], ...")
@click.option("--from", "first", type=click.IntRange(min=0), help="Compare from this iteration on.")
@click.option("--start", type=click.IntRange(min=1), help="Start of a run that was resumed.")
@click.option(
    "--tolerance",
    type=float,
    default=DEFAULT_TOLERANCE,
    show_default=True,
    help="Largest difference of two numbers that are not whole; 0: none.",
)
@click.option(
    "--ignore", multiple=True, metavar="FIELD", help="A field that is not compared, by its name."
)
@click.option("--data.verifier", "verifier", metavar="NAME", help="Score anew with this verifier.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def replay(
    folder: pathlib.Path,
    only: str | None,
    first: int | None,
    start: int | None,
    tolerance: float,
    ignore: Sequence[str],
    verifier: str | None,
    as_json: bool,
) -> int:
    """Play one worker of the recorded run in RUN again, alone, and compare what it does.

    RUN is the folder of a run, or a bundle. Exit code 1: it is not the same.
    """
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"--tolerance {tolerance}: a number from 0")
    with opened(folder) as source:
        if only is None and source.manifest is None:
            start_of = max(source.starts)
            names = ", ".join(sorted(source.launched(start_of)))
            raise UsageError(f"--only ROLE: which worker? {folder} has {names or 'none'}")
        chosen = only if only is not None or source.manifest is None else source.manifest.worker
        report = run(
            replay_opened(
                source,
                str(chosen),
                start=start,
                first=first,
                tolerance=tolerance,
                ignore=ignore,
                verifier=verifier,
            )
        )
        damaged = source.damaged
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)))
    else:
        for line in (*(f"damaged: {one}" for one in damaged), *lines_of(report)):
            click.echo(line)
    if report.scores is not None:
        return OK if report.scores.replayed else FAILED
    return OK if report.equal else FAILED


def lines_of(report: ReplayReport) -> list[str]:
    """A report for people."""
    lives = "" if report.lives == 1 else f", {report.lives} lives"
    head = f"{report.worker}, start {report.start}{lives}: {_result(report)}"
    found = [head]
    if report.scores is not None:
        found += _scores(report.scores)
    elif report.first_difference is not None:
        count = "the only difference" if report.differences == 1 else "the first difference"
        found.append(f"  {count}: {report.first_difference}")
    if report.error:
        found.append(f"  it failed as in the recording: {report.error}")
    if report.skipped:
        found.append(f"  {report.skipped} items before --from were made and not compared")
    if report.overlapped:
        found.append(f"  {report.overlapped} items or results came in another order, side by side")
    if report.forced:
        found.append(
            f"  {report.forced} inputs were given before their turn: nobody could go on otherwise"
        )
    if report.left_out:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(report.left_out.items()))
        found.append(f"  not compared: {names}")
    found += [f"  {note}" for note in report.notes]
    return found


def _result(report: ReplayReport) -> str:
    done = f"{report.calls} calls, {report.items} items, {report.compared:,} values"
    if report.scores is not None:
        return f"{len(report.scores.replayed)} samples scored anew by {report.scores.verifier}"
    if report.first_difference is not None:
        return f"DIFFERENT in {report.differences} places ({done}, {report.seconds:.1f} s)"
    if not report.compared:
        return "nothing was compared"
    largest = f", the largest difference is {report.largest:.2g}" if report.largest else ""
    return f"equal ({done} compared{largest}, {report.seconds:.1f} s)"


def _scores(scores: Scores) -> list[str]:
    both = [*scores.recorded, *scores.replayed]
    if not both:
        return ["  there is no sample with a reward"]
    low, high = min(both), max(both)
    found = [f"  {scores.changed} rewards are others than in the recording"]
    for name, values, failed in (
        ("recorded", scores.recorded, scores.failed[0]),
        ("replayed", scores.replayed, scores.failed[1]),
    ):
        mean = f"mean {statistics.fmean(values):.4f}" if values else "none"
        found.append(f"  {name}: {len(values)} rewards, {mean}, {failed} samples without one")
        found += _histogram(values, low, high)
    if scores.last_failure:
        found.append(f"  the last failure: {scores.last_failure}")
    return found


def _histogram(values: Sequence[float], low: float, high: float) -> list[str]:
    width = (high - low) / BINS or 1.0
    counts = [0] * (BINS if high > low else 1)
    for value in values:
        counts[min(int((value - low) / width), len(counts) - 1)] += 1
    most = max(counts, default=0) or 1
    return [
        f"    {low + at * width:>9.3f} {'#' * round(BAR * count / most):<{BAR}} {count}"
        for at, count in enumerate(counts)
        if count
    ]


@click.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=pathlib.Path))
@click.option("--only", metavar="ROLE[:RANK]", help="The worker; by default the one that failed.")
@click.option(
    "--around",
    default="crash",
    show_default=True,
    metavar="crash|ITERATION",
    help="Where the part of the recording ends.",
)
@click.option(
    "--iterations",
    type=click.IntRange(min=1),
    default=DEFAULT_ITERATIONS,
    show_default=True,
    help="Iterations before it that are compared.",
)
@click.option("--start", type=click.IntRange(min=1), help="Start of a run that was resumed.")
@click.option(
    "--out",
    type=click.Path(path_type=pathlib.Path),
    help="The file, .tar.zst, or a folder; by default RUN-WORKER.tar.zst beside RUN.",
)
def bundle(
    folder: pathlib.Path,
    only: str | None,
    around: str,
    iterations: int,
    start: int | None,
    out: pathlib.Path | None,
) -> None:
    """Write the part of a recording that one worker needs around a crash into one file.

    `rlinf-async replay FILE` plays it, on another machine too.
    """
    made = bundle_run(folder, only=only, around=around, iterations=iterations, start=start, out=out)
    size = f"{made.nbytes / 1e6:.2f} MB"
    click.echo(f"{made.path}: {made.manifest.worker}, {made.events} events, {size}")
    if made.manifest.error:
        click.echo(f"  it ended with {made.manifest.error}")
    for one in made.manifest.missing:
        click.echo(f"  not in it: {one}")
    click.echo(f"  rlinf-async replay {made.path}")
