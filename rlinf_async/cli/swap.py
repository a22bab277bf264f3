"""``rlinf-async swap``: workers of a run that goes on are exchanged for others."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import click

from rlinf_async.cli.failures import FAILED, OK
from rlinf_async.cli.jobs import Session
from rlinf_async.cli.runs import as_usage, shown_as_waiting
from rlinf_async.cli.train import config_of, job_of
from rlinf_async.config import ConfigError, Document, UsageError, to_toml
from rlinf_async.observe.status import look_at_run
from rlinf_async.runtime.jobs.swapping import (
    Asked,
    SwappingJob,
    absolute,
    ask,
    changes,
    check_settings,
    with_swaps,
)

_settings = {"ignore_unknown_options": True, "allow_interspersed_args": True}


@click.command(
    context_settings=_settings,
    options_metavar="[--section.field VALUE]...",
)
@click.argument("tokens", nargs=-1, type=click.UNPROCESSED, metavar="RUN ROLE")
@click.pass_obj
def swap(session: Session, tokens: tuple[str, ...]) -> int:
    """Exchange the workers of a role in the run in RUN, which goes on meanwhile.

    The new ones are started with the settings that are given, and with the code that the files
    have now; the old ones finish what they have begun. Exit code 1 where the new ones could not be
    started: the old ones go on.
    """
    folder, role, overrides = _split(tokens)
    with as_usage():
        seen = look_at_run(folder)
        if seen.state in ("ended", "killed", "ending"):
            raise UsageError(f"there is no run to swap workers of: {folder} is {seen.state}")
        asked = _checked(session, folder, role, overrides)
        with shown_as_waiting(f"{folder}: asked for other {role} workers; waiting for the run"):
            answer = ask(folder, asked)
    if answer is None:
        click.echo(f"error: the run in {folder} ended before it answered", err=True)
        return FAILED
    if answer.outcome == "refused":
        raise UsageError(answer.text)
    if answer.outcome == "failed":
        click.echo(f"error: {answer.text}", err=True)
        return FAILED
    click.echo(f"{folder}: {answer.text}")
    return OK


def _split(tokens: Sequence[str]) -> tuple[pathlib.Path, str, dict[str, str | None]]:
    """The run, the role, and the settings."""
    places: list[str] = []
    overrides: dict[str, str | None] = {}
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            places.append(token)
            continue
        name, equals, value = token.removeprefix("--").partition("=")
        given = equals or (rest and not rest[0].startswith("--"))
        overrides[name] = (value if equals else rest.pop(0)) if given else None
    if len(places) != 2:
        raise click.UsageError(
            "which run, and which of its workers? Give the run's folder and a role: "
            "rlinf-async swap RUN reward --data.verifier new.py:score"
        )
    return pathlib.Path(places[0]).expanduser(), places[1], overrides


def _checked(
    session: Session, folder: pathlib.Path, role: str, overrides: dict[str, str | None]
) -> Asked:
    """What to ask of the run; checked as the configuration of a run is."""
    started = Document.read(folder / "config.toml")
    job = job_of(session, started)
    if not isinstance(job, SwappingJob):
        raise UsageError(
            f"{folder}: workers of the job {started.tables['job']!r} cannot be swapped"
        )
    config, _ = with_swaps(config_of(job, started, {}), folder)
    check_settings(role, overrides, job)
    document = Document(str(folder / "config.toml"), to_toml(config))
    given = {name: absolute(text) for name, text in overrides.items()}
    try:
        new = config_of(job, document, given)
        job.check_swap(new, role)
    except ConfigError as error:
        raise (error if error.origin else document.located(error, given)) from error
    found = changes(config, new)
    check_settings(role, found, job)
    return Asked(role=role, settings={path: change.now for path, change in found.items()})
