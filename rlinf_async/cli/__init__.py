"""The command line: ``rlinf-async train``, ``check``, ``status``, ``stop``, ``bench``, and others.

Exit codes: 0 success; 1 the run failed, or it or a bench's bar fell short; 2 wrong input, found
before any worker started; 130 Ctrl-C; 143 SIGTERM.

Importing this brings in click and nothing heavy: torch and the runtime are loaded by the command
that needs them.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Sequence

import click

from rlinf_async.cli.checkpoints import bench, demonstrations, export, reshard
from rlinf_async.cli.envs import envs
from rlinf_async.cli.failures import guarded
from rlinf_async.cli.jobs import FindJob, Session, registered_job
from rlinf_async.cli.runs import evaluate, status, stop
from rlinf_async.cli.simulate import calibrate, simulate
from rlinf_async.cli.train import check, train
from rlinf_async.runtime.signals import RunSignals


class _Commands(click.Group):
    """Names the nearest command where one is not known."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            names = self.list_commands(ctx)
            close = difflib.get_close_matches(args[0], names, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(names)}."
            raise click.UsageError(f"{error.message} {hint}", ctx) from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rlinf-async", prog_name="rlinf-async")
def commands() -> None:
    """Reinforcement-learning post-training as a graph of async workers and typed channels."""


commands.add_command(train)
commands.add_command(check)
commands.add_command(status)
commands.add_command(stop)
commands.add_command(bench)
commands.add_command(calibrate)
commands.add_command(demonstrations)
commands.add_command(envs)
commands.add_command(evaluate)
commands.add_command(export)
commands.add_command(reshard)
commands.add_command(simulate)


def main(arguments: Sequence[str] | None = None, find_job: FindJob = registered_job) -> int:
    """Run one command and return its exit code.

    ``find_job`` gives the job for a configuration's ``job = "name"``.
    """
    session = Session(find_job)
    # Where the process is this command, and nothing else, its exit code stands when it is over.
    afterwards = signal.SIG_IGN if arguments is None else signal.SIG_DFL

    def command() -> object:
        with RunSignals().handled(afterwards):
            return commands.main(
                args=None if arguments is None else list(arguments),
                prog_name="rlinf-async",
                standalone_mode=False,
                obj=session,
            )

    return guarded(command, session)
