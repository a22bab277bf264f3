"""The command line: ``rlinf-async train``, ``check``, ``status``, ``stop``, ``bench``, and others.

Exit codes: 0 success; 1 the run failed, or it or a bench's bar fell short; 2 wrong input, found
before any worker started; 130 Ctrl-C; 143 SIGTERM.

Importing this brings in click and nothing heavy: a command's module is loaded when the command is
asked for, and torch when the command needs it.
"""

from __future__ import annotations

import difflib
import importlib
import signal
from collections.abc import Sequence

import click

from rlinf_async.cli.failures import guarded
from rlinf_async.cli.jobs import FindJob, Session
from rlinf_async.runtime.jobs import get_job
from rlinf_async.runtime.signals import RunSignals

COMMANDS = {
    "bench": ("checkpoints", "Measure, against bars and against others."),
    "bundle": ("replay", "Write the part of a recording around a crash into one file."),
    "calibrate": ("simulate", "Fit the cost models of a simulation to a real run."),
    "check": ("train", "Say whether a run could start; start nothing."),
    "classifier": ("classifier", "Learn from episodes what a success looks like."),
    "demonstrations": ("demonstrations", "Take demonstrations: of a script, or of a data set."),
    "envs": ("envs", "List simulators, their environments, and the policies that fit."),
    "evaluate": ("evaluate", "Let a trained policy act, or a trained model answer, again."),
    "export": ("checkpoints", "Write a checkpoint as a Hugging Face folder."),
    "init": ("init", "Write a small project of your own, which trains as it is."),
    "push": ("push", "Upload a trained model to the Hub of Hugging Face."),
    "replay": ("replay", "Play one worker of a recorded run again, alone."),
    "reshard": ("checkpoints", "Write a checkpoint anew, for another number of ranks."),
    "samples": ("samples", "Print what the model of a run said, and what it got for it."),
    "simulate": ("simulate", "Try a run, its placement and its scheduling in virtual time."),
    "status": ("runs", "Show the graph of a run that goes on."),
    "stop": ("runs", "End a run in order, with a checkpoint."),
    "swap": ("swap", "Exchange workers of a run that goes on."),
    "train": ("train", "Run the job that FILE.toml describes."),
    "view": ("view", "Show runs in the browser, live."),
    "waits": ("waits", "Name the bottleneck of a run, from measured waits."),
}
"""module of this package that holds a command, and its line of the help, by its name"""


class _Commands(click.Group):
    """Loads a command when it is asked for; names the nearest where one is not known."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without loading any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"rlinf_async.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

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


def main(arguments: Sequence[str] | None = None, find_job: FindJob = get_job) -> int:
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
