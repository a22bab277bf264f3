"""``rlinf-async demonstrations``: record them from a scripted policy."""

from __future__ import annotations

import pathlib

import click

from rlinf_async.cli.jobs import Session
from rlinf_async.cli.train import config_of, job_of
from rlinf_async.config import Document, UsageError


@click.command(short_help="Record demonstrations from a scripted policy.")
@click.argument("file", metavar="FILE.toml")
@click.option(
    "--policy",
    required=True,
    metavar="FILE.py:FUNCTION",
    help="Called with the environment and a seed; returns a function: observation -> action.",
)
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=pathlib.Path, file_okay=False),
    help="A new folder for the demonstrations.",
)
@click.option("--episodes", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--keep-failures", is_flag=True, help="Keep episodes too that did not succeed.")
@click.pass_obj
def demonstrations(
    session: Session,
    file: str,
    policy: str,
    out: pathlib.Path,
    episodes: int,
    seed: int,
    keep_failures: bool,
) -> None:
    """Let a scripted policy play in the environment of FILE.toml, and keep what it did.

    `actor.cloning.demonstrations` names the folder for a run that learns from it.
    """
    from rlinf_async.runtime.jobs.embodied.config import DemonstrationsConfig
    from rlinf_async.runtime.jobs.embodied.recording import record_apart
    from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings
    from rlinf_async.workers.env import EnvError

    document = Document.read(file)
    job = job_of(session, document)
    if not issubclass(job.config_type, EnvironmentSettings):
        raise UsageError(
            f"{file} is for {document.tables['job']!r}, which has no environment: demonstrations "
            "are of an environment, as in a file for 'embodied_ppo'"
        )
    config = config_of(job, document, {})
    try:
        wanted = DemonstrationsConfig(policy=policy, episodes=episodes, seed=seed)
        info = record_apart(config, wanted, out, keep_failures=keep_failures)
    except EnvError as error:
        raise UsageError(str(error)) from error
    known = (
        "; the environment does not say whether they succeeded"
        if info.successes is None
        else f", {info.successes} of them successful"
    )
    click.echo(f"{out}: {info.episodes} episodes of {info.env}{known}")
