"""How a command ends: its exit code, and one message for an error."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeGuard

import click

from rlinf_async.cli.jobs import Session
from rlinf_async.config.registry import UsageError, raised
from rlinf_async.runtime.signals import EXIT_CODE as TERMINATED
from rlinf_async.runtime.signals import Terminated
from rlinf_async.workers.base import BuildError, WorkerError

OK = 0
FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130


def guarded(command: Callable[[], object], session: Session) -> int:
    """Run a command; what it raises is printed on stderr, and decides the exit code."""
    try:
        result = command()
    except BaseException as error:
        return _failed(first_cause(error), session)
    return result if isinstance(result, int) else OK


def _failed(error: BaseException, session: Session) -> int:
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    if isinstance(error, Terminated):
        click.echo("terminated", err=True)
        return TERMINATED
    if isinstance(error, (UsageError, BuildError)):  # found before anything started
        click.echo(f"error: {error}", err=True)
        return WRONG_INPUT
    if not isinstance(error, Exception):
        raise error
    _report(error, session)
    return FAILED


def _report(error: Exception, session: Session) -> None:
    if session.traceback:
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
        return
    click.echo(f"error: {message(error)}", err=True)
    if not _is_ours(error) or _is_explained(error):
        click.echo("(--traceback shows where this was raised)", err=True)


def message(error: BaseException) -> str:
    """The message of an error; with its type where it is not one of ours, which say all in
    words. Its notes follow, each on a line."""
    return "\n".join([_message(error), *getattr(error, "__notes__", ())])


def _message(error: BaseException) -> str:
    if _is_explained(error):
        return error.summary
    if _is_ours(error):
        return str(error)
    if isinstance(error, BaseExceptionGroup):
        causes = "\n".join(f"- {message(inner)}" for inner in error.exceptions)
        return f"{len(error.exceptions)} things failed:\n{causes}"
    return raised(error).removesuffix(": ")


def _is_explained(error: BaseException) -> TypeGuard[WorkerError]:
    """Whether the worker's traceback adds nothing to its message (as with a full disk)."""
    return isinstance(error, WorkerError) and error.failure.explained


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] == "rlinf_async"


def first_cause(error: BaseException) -> BaseException:
    """Return the one error inside a group; a group that has an interrupt counts as an interrupt."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    if (interrupts := error.subgroup((KeyboardInterrupt, Terminated))) is not None:
        return first_cause(interrupts.exceptions[0])
    return first_cause(error.exceptions[0]) if len(error.exceptions) == 1 else error
