"""``rlinf-async bench``: measure against the bars, and against others."""

from __future__ import annotations

import pathlib

import click

from rlinf_async.config import UsageError


@click.command(short_help="Measure, against bars and against others.")
@click.argument("name", required=False)
@click.option("--list", "listed", is_flag=True, help="Name the benches, one line each.")
@click.option("--peers", is_flag=True, help="Measure the others too (installs them once).")
@click.option(
    "--case", "cases", multiple=True, help="Only cases whose name holds this; repeatable."
)
@click.option("--repetitions", type=click.IntRange(min=1), help="How often each case is run.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    help="Write every measurement to this file.",
)
def bench(
    name: str | None,
    listed: bool,
    peers: bool,
    cases: tuple[str, ...],
    repetitions: int | None,
    json_file: pathlib.Path | None,
) -> int:
    """Run the bench NAME: ours and the others alternating, medians, and each bar's verdict."""
    from rlinf_async.bench.discover import all_benches, bench_named

    if listed:
        for one in all_benches():
            click.echo(f"{one.name:12} {one.summary}")
        return 0
    if name is None:
        raise click.UsageError("which bench? --list names them.")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UsageError(f"--json {json_file}: the folder {json_file.parent} does not exist")
    from rlinf_async.bench.command import run_bench

    return run_bench(
        bench_named(name),
        with_peers=peers,
        cases=cases,
        repetitions=repetitions,
        json_file=json_file,
    )
