"""Errors of environments.

::

    EnvError                 an environment cannot be used, or failed while it ran
    +-- EnvFailed            it raised, or returned what cannot be trained on: names env, step, seed
    RolloutGone              no rollout worker is left that could answer (a ChannelError)

A wrong configuration raises `rlinf_async.config.UsageError` before any environment is made.
"""

from __future__ import annotations

import signal

from rlinf_async.channels import ChannelError
from rlinf_async.config.errors import raised


class EnvError(RuntimeError):
    """The environment cannot be used: its spaces, or what was answered for them, do not fit."""


def is_interrupt(error: BaseException) -> bool:
    """Whether it is the user's Ctrl-C, which nobody handles: the environment has not raised it.

    Everything else that comes out of a call of an environment is its error: SystemExit too, and
    what a library in Rust raises where it panics.
    """
    return (
        isinstance(error, KeyboardInterrupt)
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def not_made(what: str, error: BaseException, hint: str = "") -> EnvError:
    """The error where the making of an environment raised; a Ctrl-C is raised as it is."""
    if is_interrupt(error):
        raise error
    return EnvError(f"{what} raised {raised(error)}{hint}")


class EnvFailed(EnvError):
    """One environment raised, or returned what cannot be trained on: NaN, infinity, a reward beyond
    `MAX_REWARD`."""


class RolloutGone(ChannelError):
    """The channel of answers has ended while a question was open."""
