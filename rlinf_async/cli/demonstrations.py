"""``rlinf-async demonstrations``: episodes of somebody who can do the task, in a folder."""

from __future__ import annotations

import pathlib
from typing import Any

import click

from rlinf_async.cli.jobs import Session
from rlinf_async.cli.train import config_of, job_of
from rlinf_async.config import Document, UsageError


@click.command()
@click.argument("file", metavar="FILE.toml")
@click.option(
    "--policy",
    metavar="FILE.py:FUNCTION",
    help="Called with the environment and a seed; returns a function: observation -> action.",
)
@click.option(
    "--from-rlds",
    "rlds",
    metavar="FOLDER",
    type=click.Path(path_type=pathlib.Path, file_okay=False),
    help="In place of a policy: a data set in RLDS, such as bridge/1.0.0.",
)
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=pathlib.Path, file_okay=False),
    help="A new folder for the demonstrations.",
)
@click.option(
    "--episodes", type=click.IntRange(min=1), help="By default 100 of a policy, all of a data set."
)
@click.option("--seed", type=click.IntRange(min=0), help="Of a policy's first.  [default: 0]")
@click.option("--keep-failures", is_flag=True, help="Keep episodes too that did not succeed.")
@click.option("--split", help="Of a data set.  [default: train]")
@click.option(
    "--part",
    "parts",
    multiple=True,
    metavar="NAME=FEATURE[,FEATURE]",
    help="Where a data set has this part of an observation, or the action; repeatable.",
)
@click.option(
    "--last-step",
    type=click.Choice(["keep", "drop"]),
    help="Whether action and reward of the last step of a data set's episodes count.",
)
@click.option("--resize", is_flag=True, help="Bring a data set's images to the environment's size.")
@click.pass_obj
def demonstrations(session: Session, /, file: str, out: pathlib.Path, **options: Any) -> None:
    """Let a scripted policy play in the environment of FILE.toml, and keep what it did; or take
    the episodes of a data set in RLDS.

    `actor.cloning.demonstrations` names the folder for a run that learns from it.
    """
    from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings
    from rlinf_async.workers.env import EnvError

    _check_source(options)
    document = Document.read(file)
    job = job_of(session, document)
    if not issubclass(job.config_type, EnvironmentSettings):
        raise UsageError(
            f"{file} is for {document.tables['job']!r}, which has no environment: demonstrations "
            "are of an environment, as in a file for 'embodied_ppo'"
        )
    config = config_of(job, document, {})
    try:
        (_import if options["rlds"] else _record)(config, out, options)
    except EnvError as error:
        raise UsageError(str(error)) from error


def _check_source(options: dict[str, Any]) -> None:
    """Raise `click.UsageError` unless it is a policy or a data set, with its own options."""
    if (options["policy"] is None) == (options["rlds"] is None):
        raise click.UsageError("whose episodes? --policy FILE.py:FUNCTION, or --from-rlds FOLDER")
    other, names = (
        ("--policy", ("seed", "keep_failures"))
        if options["rlds"]
        else ("--from-rlds", ("split", "parts", "last_step", "resize"))
    )
    for name in names:
        if options[name] not in (None, False, ()):
            said = "part" if name == "parts" else name.replace("_", "-")
            raise click.UsageError(f"--{said} is for {other}")


def _record(config: Any, out: pathlib.Path, options: dict[str, Any]) -> None:
    """Record episodes of a scripted policy."""
    from rlinf_async.runtime.jobs.embodied.playing import record_apart
    from rlinf_async.runtime.jobs.embodied.settings import DemonstrationsConfig

    wanted = DemonstrationsConfig(
        policy=options["policy"], episodes=options["episodes"] or 100, seed=options["seed"] or 0
    )
    info = record_apart(config, wanted, out, keep_failures=options["keep_failures"])
    known = (
        "; the environment does not say whether they succeeded"
        if info.successes is None
        else f", {info.successes} of them successful"
    )
    click.echo(f"{out}: {info.episodes} episodes of {info.env}{known}")


def _import(config: Any, out: pathlib.Path, options: dict[str, Any]) -> None:
    """Take the episodes of a data set."""
    from rlinf_async.runtime.jobs.embodied.importing import Imported, RldsSource, import_rlds
    from rlinf_async.runtime.jobs.embodied.playing import call_in_env_process

    parts: dict[str, tuple[str, ...]] = {}
    for one in options["parts"]:
        name, _, features = one.partition("=")
        parts[name] = tuple(filter(None, features.split(",")))
        if not parts[name]:
            raise click.UsageError(f"--part {one}: is it NAME=FEATURE? observation/image, say")
    source = RldsSource(
        folder=options["rlds"].absolute(),
        split=options["split"] or "train",
        parts=parts,
        episodes=options["episodes"],
        resize=options["resize"],
        last_step=options["last_step"] or "",
    )
    done = call_in_env_process(config, import_rlds, Imported, config, source, out.absolute())
    click.echo(f"{out}: {done.info.episodes} episodes, {done.steps} steps")
    for name, features in done.found.items():
        size = " (resized)" if name in done.resized else ""
        click.echo(f"  {name}: {' + '.join(features)}{size}")
    if not done.info.transitions:
        click.echo(
            "  no reward or is_terminal: they can be cloned, not learned from as transitions"
        )
    if done.without_actions:
        click.echo(f"  left out, since one step has no action: {done.without_actions}")
    if done.clipped:
        share = done.clipped / done.steps
        click.echo(
            f"  clipped: the actions of {done.clipped} steps ({share:.1%}) lay outside of the "
            "environment's bounds; are they in its units?"
        )
